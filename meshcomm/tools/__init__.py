"""``python -m meshcomm``: the doctor, what dumps say about why ranks hang, and whether a program is that of one rank.

In: this machine, a folder of dumps, or a function. Out: lines to read, and an exit code.
"""
