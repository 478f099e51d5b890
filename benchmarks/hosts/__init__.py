"""Real hosts on one machine, joined by links of a chosen rate, and what wins on such a network."""
