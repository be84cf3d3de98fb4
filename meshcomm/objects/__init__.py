"""Python objects between ranks.

In: what can be pickled. Out: the same objects on other ranks, tensors beside the pickle and not in it.
"""
