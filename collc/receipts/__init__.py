"""What XLA made of a program, read back from what it compiled (no jax)."""
