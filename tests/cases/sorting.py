"""Cases for rules/sorting.py."""

from oracle import Case

CASES: list[Case] = []
