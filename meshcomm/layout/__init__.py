"""How global tensors lie on a mesh, in einops' notation, and what takes them from one layout to another.

In: tensors and patterns. Out: tensors in another layout, by the cheapest collectives, or the plan of those.
"""
