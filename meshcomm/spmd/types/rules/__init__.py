"""What the checker does at each kind of operation: torch's, collectives, custom Functions, hooks, writes to leaves."""
