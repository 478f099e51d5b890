"""Each example runs by itself and ends well, as `python examples/x.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


def test_there_are_examples():
    steps = {"nnx_step", "linen_step", "optax_pytree"}
    digits = {"digits_nnx", "digits_linen", "digits_pytree"}  # each is right for 95 % or more
    assert {e.stem for e in EXAMPLES} >= steps | digits


@pytest.mark.newest_only
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example, tmp_path):
    # The example chooses its devices itself.
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run(
        [sys.executable, str(example)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "loss" in done.stdout
