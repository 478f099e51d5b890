"""Many processes: starting them, and watching over them."""
