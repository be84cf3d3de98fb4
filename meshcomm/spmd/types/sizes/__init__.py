"""Sizes that depend on data, for the checker of varying types."""
