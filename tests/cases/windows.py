"""Cases for rules/windows.py."""

from oracle import Case

CASES: list[Case] = []
