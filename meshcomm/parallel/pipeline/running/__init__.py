"""One step of a pipeline on a rank: what it does, what it sends, and what several stages have together."""
