"""Processes of one machine: what one lends from its memory, the others read where it is."""
