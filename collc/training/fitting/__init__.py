"""``collc.fit``: the loop around a step, and what it leaves behind."""
