"""Python objects between ranks."""
