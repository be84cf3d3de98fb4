"""What was communicated: traces of it, and budgets for it."""
