"""The two runtimes behind one protocol: processes (torch.distributed) and ranks in one process.

In: an axis of a mesh, as ranks and a name. Out: a link, whose few operations every collective is made of. What lies
here beside the folders is what they all speak of: a call in words, a result that is under way, the user's line.
"""
