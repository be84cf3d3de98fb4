"""Mixtures of experts whose experts are cut along an axis."""
