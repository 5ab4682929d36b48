"""Primitives that fold an axis, and those that run along one."""
