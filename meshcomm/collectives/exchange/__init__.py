"""Every rank sends and every rank receives."""
