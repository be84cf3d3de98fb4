"""Random numbers that any mesh draws alike."""
