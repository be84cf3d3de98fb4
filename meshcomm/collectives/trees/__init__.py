"""Pytrees: which leaves go together, and sums of their gradients while backward runs.

In: leaves and a rule of one tensor. Out: what the rule makes of each, with few calls.
"""
