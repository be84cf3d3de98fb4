"""The collectives, each beside its backward.

I is invariant (the same on every rank of the axis), V is varying (each rank has its own).
"""
