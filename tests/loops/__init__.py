"""Other people's loops around models that adaptors have made parallel: test_other_loops.py starts them under torchrun."""
