"""Data parallelism, and gradients of several backward passes or over unequal means."""
