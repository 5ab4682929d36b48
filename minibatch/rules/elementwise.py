"""Primitives that act on each element by itself."""

from minibatch._registry import elementwise

elementwise("add sin")
