"""Which schedule, and why."""
