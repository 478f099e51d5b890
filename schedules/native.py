"""XLA's own collectives: axioms, which compose with the rest, flat over several axes too."""

from collc import language as cl

all_reduce = cl.native("all_reduce")
reduce_scatter = cl.native("reduce_scatter")
all_gather = cl.native("all_gather")
all_to_all = cl.native("all_to_all")
broadcast = cl.native("broadcast")
