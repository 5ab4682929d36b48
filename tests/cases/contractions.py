"""Cases for rules/contractions.py."""

from oracle import Case

CASES: list[Case] = []
