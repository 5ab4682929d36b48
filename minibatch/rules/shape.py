"""Primitives that move elements without looking at them."""
