"""Processes of one machine: what one lends from its memory, the others read where it is.

In: tensors of the CPU. Out: the same results as gloo's, without sending; or an error that tells who has called what.
"""
