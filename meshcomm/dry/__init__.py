"""Dry runs: one rank of a mesh of any size, with tensors that have no memory and others that are not there.

In: a program of no arguments and a mesh as sizes. Out: what it would communicate, read on the host and keep in memory.
"""
