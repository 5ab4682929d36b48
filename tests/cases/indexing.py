"""Cases for rules/indexing.py."""

from oracle import Case

CASES: list[Case] = []
