"""What is known of a schedule before it runs: proofs, bounds, a reference. Never imports jax."""
