"""Schedules become device code, through ``jax.shard_map``'s manual axes."""
