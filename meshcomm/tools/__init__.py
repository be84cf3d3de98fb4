"""``python -m meshcomm``: the doctor, and what dumps say about why ranks hang."""
