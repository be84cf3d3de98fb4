"""Tensor and sequence parallelism: functions, and a plan of names for a module that knows nothing of it.

In: a module and which of its parameters are cut how. Out: the same module in parts, with the same results.
"""
