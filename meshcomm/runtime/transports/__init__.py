"""What moves bytes between the ranks of an axis. A transport knows nothing of types, guards or traces."""
