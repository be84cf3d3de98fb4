"""The guard: before a call moves anything, its ranks agree on what it is.

In: what this rank is about to call. Out: nothing, or on every rank an error that tells what each has called.
"""
