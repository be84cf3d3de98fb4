"""One rank of a mesh whose other ranks are not there.

In: tensors without memory, and numbers of the host. Out: what would come from the others: its shape, or its bytes.
"""
