"""This process: whether it is a fork of a rank, how it ends, what it says at home, the memory that it shares.

In and out: facts that hold for the process as a whole, so that every other room may know them; they know no other room.
"""
