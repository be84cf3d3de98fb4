"""Messages over gloo: with envelopes, which say what they are, and without, where both sides know."""
