"""Calls to the host."""
