"""Which process is the odd one out."""

from collc.planning.agree import differences


def test_the_odd_one_out_is_the_rarer_one():
    facts = {0: {"jax": "2", "x": "a"}, 1: {"jax": "1", "x": "a"}, 2: {"jax": "1", "x": "a"}}
    assert differences(facts) == [(0, "jax", "2", "1")]
    assert differences({0: {"a": "1"}, 1: {}}) == [(1, "a", "", "1")]
