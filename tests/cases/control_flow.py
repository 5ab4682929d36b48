"""Cases for rules/control_flow.py."""

from oracle import Case

CASES: list[Case] = []
