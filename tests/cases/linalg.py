"""Cases for rules/linalg.py."""

from oracle import Case

CASES: list[Case] = []
