"""Cases for rules/calls.py."""

from oracle import Case

CASES: list[Case] = []
