"""``python -m meshcomm``: the doctor, and what dumps say about why ranks hang.

In: this machine, or a folder of dumps. Out: lines to read, and an exit code.
"""
