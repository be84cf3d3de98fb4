"""Who wants to know of every call: the ring of the last ones, and what wraps a link.

In: each call, with what the ranks must have in common. Out: the last calls in memory or as files, and a refusal where
the ranks do not agree.
"""
