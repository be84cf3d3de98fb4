"""The checker of varying types: along which axes each value of a rank varies."""
