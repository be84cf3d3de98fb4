"""Attention over a sequence that is cut along an axis."""
