"""shard_map: a function of one rank's parts, called with global tensors.

In: the function, global tensors, and how each is cut. Out: global tensors, differentiable, whoever runs the ranks.
"""
