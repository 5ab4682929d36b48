"""Primitives that speak of axes by name."""
