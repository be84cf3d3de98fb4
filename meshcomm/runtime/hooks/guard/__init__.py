"""The guard: before a call moves anything, its ranks agree on what it is."""
