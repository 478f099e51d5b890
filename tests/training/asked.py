"""What a traced program asks of collc's collectives."""

from collc.training.check.values import holds_jaxpr, opened


def collectives(jaxpr, times=1):
    """(dtype, elements, how often) of every collective of collc in a jaxpr."""
    for eqn in opened(jaxpr).eqns:
        if eqn.primitive.name == "collc_collective":
            yield from ((v.aval.dtype.name, v.aval.size, times) for v in eqn.invars)
        inner = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for param in eqn.params.values():
            for one in param if isinstance(param, tuple | list) else (param,):
                if holds_jaxpr(one):
                    yield from collectives(one, inner)
