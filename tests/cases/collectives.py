"""Cases for rules/collectives.py."""

from oracle import Case

CASES: list[Case] = []
