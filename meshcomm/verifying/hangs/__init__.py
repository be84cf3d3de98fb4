"""Whether ranks can wait for one another for ever, from what each of them calls and where it waits.

In: a log per rank, from a trace or a dry run. Out: a proof, or the calls that part, and the cycle of those that wait.
"""
