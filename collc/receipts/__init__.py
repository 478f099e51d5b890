"""What XLA made of a program, read back from what it compiled. HLO text is read without jax."""
