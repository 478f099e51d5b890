"""A training on emulated hosts that faults of a seed befall, one after the other."""
