"""One program for all ranks, written once: shard_map.

``shard_map`` calls it with global tensors, ``types`` checks along which axes its values vary, ``random`` draws in it.
"""
