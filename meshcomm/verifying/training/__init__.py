"""A training loop on a mesh against the same loop on one rank.

In: how a module, its optimiser and a step are made on a mesh, and batches. Out: a report that names the first step at
which a loss, a gradient, a parameter or a state of the optimiser is another one.
"""
