"""Ranks of one process: cooperative threads that meet at each call."""
