"""Which mesh and which options are best for a program: found by running it dry with each of them.

In: a program, meshes or changes, a machine. Out: what each of them takes, the best one first.
"""
