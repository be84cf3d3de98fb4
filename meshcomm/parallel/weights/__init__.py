"""Whole tensors by name, of files and into them."""
