"""Optimisers on several ranks: states of which each rank keeps a part, and steps of torch's that need more than one
rank has of a parameter.
"""
