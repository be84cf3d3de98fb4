"""Layers of torch that can be cut: products in columns or rows, and attention in heads."""
