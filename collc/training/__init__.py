"""Train steps over a plan, checked when traced; and the run around them."""
