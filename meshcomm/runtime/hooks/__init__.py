"""Who wants to know of every call: the ring of the last ones, and what wraps a link."""
