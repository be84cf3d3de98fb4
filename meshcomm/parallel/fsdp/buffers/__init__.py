"""Flat memory of units: how tensors lie in it, who had it before, and copies between devices."""
