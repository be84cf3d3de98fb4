"""Data parallelism, and gradients of several backward passes or over unequal means.

In: a module and this rank's rows. Out: the gradients of the whole batch.
"""
