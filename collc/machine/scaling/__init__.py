"""How a train step scales: a machine that grows, a study of prices on it, and its tables."""
