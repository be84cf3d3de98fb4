"""Processes of several machines: those of one meet in shared memory, and each speaks to its peers on the others.

In: the indices of an axis by machine. Out: a link; what it does not do in two levels it has of a process group's.
"""
