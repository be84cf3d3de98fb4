"""How global tensors lie on a mesh, in einops' notation, and what takes them from one layout to another."""
