"""Primitives that order elements along an axis."""
