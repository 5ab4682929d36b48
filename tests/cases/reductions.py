"""Cases for rules/reductions.py."""

from oracle import Case

CASES: list[Case] = []
