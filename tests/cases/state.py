"""Cases for rules/state.py."""

from oracle import Case

CASES: list[Case] = []
