"""Pipelines: stages of a model on the ranks along an axis, one after the other."""
