"""A train step whose arguments are shapes alone, and that is the step that trains."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

import collc
from collc.errors import DataError
from collc.models import transformer
from collc.training.lm.abstract import abstract_step


def test_no_array_is_made_and_every_shape_is_placed(mesh):
    _, arguments = abstract_step("transformer:medium", mesh, batch=3, seq=64)
    *state, text = (jax.tree.leaves(x) for x in arguments)
    leaves = [leaf for part in state for leaf in part]
    assert {type(leaf) for leaf in leaves} == {jax.ShapeDtypeStruct}
    assert {leaf.sharding.spec for leaf in leaves} == {P()}
    assert (text[0].shape, text[0].dtype.name) == ((24, 65), "int32")
    assert text[0].sharding.spec == P(("host", "gpu"))
    assert transformer.parameters(arguments[0]) >= 350e6


def test_a_token_of_a_small_model_is_a_byte(mesh):
    assert abstract_step("transformer:tiny", mesh)[1][2].dtype == "uint8"


@pytest.mark.parametrize("planned", [pytest.param(False, marks=pytest.mark.newest_only), True])
def test_the_step_reduces_and_takes_over_the_memory_of_its_state(mesh, planned):
    by = collc.plan(mesh, {"gpu": "ring", "host": "tree"}) if planned else mesh
    step, arguments = abstract_step("transformer:tiny", by, batch=1, seq=8)
    traced = step.trace(*arguments)
    assert ("collc_collective" in str(traced.traced.jaxpr)) == planned
    found = traced.lower().compile().compiled.memory_analysis()
    assert 0 < found.argument_size_in_bytes - found.alias_size_in_bytes <= 16  # the batch


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("medium", {}, "Write it as transformer:medium"),
        ("transformr:medium", {}, "Did you mean transformer"),
        ("transformer:medum", {}, "Did you mean medium"),
        ("transformer:tiny", {"batch": 0}, "batch is 0"),
        ("transformer:tiny", {"seq": 0}, "seq is 0"),
    ],
)
def test_bad_names_and_sizes_are_refused(mesh, name, given, message):
    with pytest.raises(DataError, match=message):
        abstract_step(name, mesh, **given)
