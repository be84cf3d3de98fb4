"""Who of the other processes is there, who is late, and who has come to a barrier.

In: a store, and what a rank waits for. Out: who has ended and why, and the text of a time-out.
"""
