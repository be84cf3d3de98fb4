"""Ranks of one process: cooperative threads that meet at each call.

In: one function for all ranks. Out: its results, in a run that is the same each time; a deadlock is an error at once.
"""
