"""Cases for rules/random.py."""

from oracle import Case

CASES: list[Case] = []
