"""Tensor and sequence parallelism: functions, and a plan of names for a module that knows nothing of it."""
