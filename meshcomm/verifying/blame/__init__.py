"""Whose fault it is: what each rank did, step by step, beside what one device did, and the line at which they part.

In: the steps of all ranks and those of the twin. Out: a line, what is known of it, and what to write there.
"""
