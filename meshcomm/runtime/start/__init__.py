"""How processes begin and end: what was asked for, who they are, how they find each other.

In: the arguments of ``init`` and ``launch``, and the variables of a launcher. Out: this process's place in the world, a
process group of torch's, and an end without a hang or a crash. Who must hear of a beginning or an end
registers for it.
"""
