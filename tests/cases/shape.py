"""Cases for rules/shape.py."""

from oracle import Case

CASES: list[Case] = []
