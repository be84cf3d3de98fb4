"""Plans that are found: what stands in a model is looked at as it runs, and what is found is proved on a small copy."""
