"""What was communicated: traces of it, and budgets for it.

In: the primitives of the links of a thread, while somebody asks. Out: a table, a file for a trace viewer, or an error
where a budget is passed.
"""
