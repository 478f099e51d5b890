"""The tell-tale data: exact, unique, and nothing that is wrong goes unnoticed."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from collc.bench.telltale import TellTale
from collc.receipts.timing import compiled, per_device

N, LENGTH = 4, 8
EXACT = {"float32": 2**24, "float16": 2**11, "bfloat16": 2**8}


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, N), ("host", "gpu"), devices=jax.devices()[: 2 * N])


def wrong(mesh, collective, function, dtype="float32", use="fresh", length=LENGTH, axes=("gpu",)):
    x = jnp.zeros(mesh.devices.size * length, dtype)
    x = jax.device_put(x, jax.NamedSharding(mesh, jax.P(mesh.axis_names)))
    ready = compiled(function or per_device(collective, axes), mesh, x, use)
    tell = TellTale(mesh, collective, axes, length, dtype, use == "intermediate")
    return tell.wrong({"it": ready})["it"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "all_to_all"])
def test_what_is_right(mesh, collective, dtype):
    for axes in (("gpu",), ("gpu", "host")):
        assert wrong(mesh, collective, None, dtype, axes=axes) == 0
    if collective == "all_to_all":
        assert wrong(mesh, collective, None, dtype, "donated") == 0
        assert wrong(mesh, collective, None, dtype, "intermediate") == 0


def next_rank(x):
    return lax.ppermute(x, "gpu", [(r, (r + 1) % N) for r in range(N)])


def shifted_up_and_down(x):
    """One rank's chunk comes one element later and another's one earlier."""
    r = lax.axis_index("gpu")
    return lax.psum(jnp.where(r == 1, jnp.roll(x, 1), jnp.where(r == 2, jnp.roll(x, -1), x)), "gpu")


ALL = 2 * N * LENGTH  # elements of the outputs of all devices
MUTANTS = {
    "the chunks of the next rank": ("all_gather", lambda x: lax.all_gather(
        next_rank(x), "gpu", tiled=True), N * ALL),
    "everyone gets the first chunk": ("all_gather", lambda x: jnp.tile(x, N), N * ALL - ALL),
    "the wrong chunk": ("reduce_scatter", lambda x: next_rank(
        lax.psum_scatter(x, "gpu", tiled=True)), ALL // N),
    "nothing is sent": ("all_to_all", lambda x: x, ALL - ALL // N),
    "nothing is added": ("all_reduce", lambda x: x, ALL),
    "one addend is missing": ("all_reduce", lambda x: lax.psum(
        jnp.where(lax.axis_index("gpu") == 2, 0, x), "gpu"), ALL),
    "one element of one rank": ("all_reduce", lambda x: lax.psum(x, "gpu").at[3].add(
        lax.axis_index("gpu") == 2), 2),
    "NaN": ("all_reduce", lambda x: lax.psum(x, "gpu") * jnp.nan, ALL),
    "the largest, not the sum": ("all_reduce", lambda x: lax.pmax(x, "gpu"), ALL),
    "shifts that cancel out": ("all_reduce", shifted_up_and_down, ALL),
    "the sum over all axes": ("all_reduce", lambda x: lax.psum(x, ("host", "gpu")), ALL),
    "another root": ("broadcast", lambda x: lax.all_gather(x, "gpu")[1], ALL),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_what_is_wrong_is_counted(mesh, name):
    collective, function, count = MUTANTS[name]
    assert wrong(mesh, collective, function) == count


@pytest.mark.parametrize(
    "name", ["the largest, not the sum", "one addend is missing", "another root"]
)
def test_what_is_wrong_is_noticed_in_eight_bits(mesh, name):
    collective, function, count = MUTANTS[name]
    # Two values of 256 may be alike by chance; never all of them.
    assert 0.9 * count <= wrong(mesh, collective, function, "bfloat16") <= count


def big(collective, dtype, n, length=3):
    """A mesh that is larger than the devices there are: the data needs none."""
    mesh = types.SimpleNamespace(axis_names=("gpu",), shape={"gpu": n}, devices=np.arange(n))
    return TellTale(mesh, collective, ("gpu",), length, dtype)  # pyright: ignore


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("n", [1, 2, 7, 64, 300, 1000])
def test_sums_are_exact(n, dtype):
    carried = np.zeros((n, 3), bool)
    for x in big("all_reduce", dtype, n).passes():
        exact = np.asarray(x, np.float64)
        assert exact.sum(0).max() <= EXACT[dtype]
        assert (exact == np.floor(exact)).all() and (exact >= 0).all()
        carried |= exact > 0
    assert carried.all(), "every element of every rank takes part"


@pytest.mark.parametrize("dtype", [*EXACT, "int8", "uint8", "int32"])
def test_what_moves_is_unique(dtype):
    tell = big("all_gather", dtype, 300, 11)
    spelled = np.stack([np.asarray(x, np.float64).reshape(-1) for x in tell.passes()])
    assert len(np.unique(spelled, axis=1).T) == 3300
    assert (spelled <= EXACT.get(dtype, 127 if "8" in dtype else 2**31 - 1)).all()


def test_groups(mesh):
    def groups(*axes):
        return TellTale(mesh, "all_gather", axes, 1, "float32").groups.tolist()

    assert groups("gpu") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups("host") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert groups("gpu", "host") == [[0, 4, 1, 5, 2, 6, 3, 7]]
