"""Random numbers that any mesh draws alike.

In: a seed and a global shape. Out: each rank's part of the same global numbers, however the mesh is cut.
"""
