"""Cases for rules/callbacks.py."""

from oracle import Case

CASES: list[Case] = []
