"""collc compile and collc hlo: what they print, what they refuse, and in which words."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = f"{ROOT / 'examples' / 'pod_step.py'}:train_step"
HLO = ROOT / "tests" / "receipts" / "hlo"
POD = ("--pod", "h100:2x8")
PLAN = ("--plan", "gpu=ring,host=tree")

FILE = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

import collc

W = jax.ShapeDtypeStruct((64,), jnp.float32)


def shapes(mesh):
    return {"w": W, "x": jax.ShapeDtypeStruct((mesh.size, 64), jnp.float32)}


def step(w, x):
    return w - collc.pmean(jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w))


def forgets(w, x):
    return w - x.sum(0)


def raises(w, x):
    if w[0] > 0:
        return w
    return x


def plain(w, x):
    return w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)


def plain_shapes(mesh):
    split = NamedSharding(mesh, P(mesh.axis_names))
    return {"w": W, "x": jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=split)}


def large(x):
    return x + 1


def large_shapes():
    return (jax.ShapeDtypeStruct((2**15, 2**19), jnp.float32),)


def s_seven():
    return 7


def s_two(mesh, n):
    return ()


def s_text():
    return {"w": "hello", "x": W}


def s_name():
    return {"w": W, "y": W}


def s_few():
    return (W,)


def s_many():
    return W, W, W


def s_raises(mesh):
    return 1 / 0


def s_other():
    here = NamedSharding(jax.make_mesh((1,), ("gpu",)), P())
    return {"w": jax.ShapeDtypeStruct((64,), jnp.float32, sharding=here), "x": W}


def s_scalar():
    return {"w": W, "x": jax.ShapeDtypeStruct((), jnp.float32)}


def s_bare(mesh):
    return {"w": W, "x": jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=P(mesh.axis_names))}


jitted = jax.jit(step)
number = 3
"""


@pytest.fixture
def steps(tmp_path, monkeypatch):
    """A folder with a file of steps, good and bad, as the working directory."""
    (tmp_path / "s.py").write_text(FILE)
    (tmp_path / "broken.py").write_text("import jax\n\n1 / 0\n")
    (tmp_path / "syntax.py").write_text("def f(:\n")
    (tmp_path / "alone.py").write_text("def f(x):\n    return x\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def needs_pod(test):
    return pytest.mark.newest_only(pytest.mark.usefixtures("pod")(test))


def test_help_loads_no_jax():
    code = """
import sys
from typer.testing import CliRunner
from collc.cli import app
for args in (["--help"], ["compile", "--help"], ["hlo", "--help"]):
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
assert not {"jax", "flax"} & sys.modules.keys()
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_help_says_the_defaults_of_models(cli, monkeypatch):
    from collc.training.lm.abstract import BATCH, SEQ

    monkeypatch.setenv("COLUMNS", "200")
    said = cli("compile", "--help").stdout
    assert f"examples on each GPU. Default: {BATCH}." in said
    assert f"tokens that an example predicts. Default: {SEQ}." in said


# ---- hlo ------------------------------------------------------------------------------------------


def test_hlo_of_a_file_with_and_without_a_mesh(cli, golden, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    path = str(HLO / "loop-cuda-0.12.txt")
    alone = cli("hlo", path)
    assert alone.exit_code == 0 and alone.stderr == ""
    golden("receipt_hlo.txt", alone.stdout)
    meshed = cli("hlo", path, "--mesh", "host=2,gpu=8")
    assert "jit_loop on 16 GPUs: host=2, gpu=8" in meshed.stdout and "pairs" not in meshed.stdout


def test_hlo_as_json_and_annotated(cli):
    path = str(HLO / "fsdp-cuda-0.12.txt")
    found = json.loads(cli("hlo", path, "--json").stdout)
    assert found["counts"] == {"all-gather": 8, "all-reduce": 1, "reduce-scatter": 4}
    assert found["collectives"][0]["among"] == "1 group of 16"
    assert "  // all-gather in 1 group of 16" in cli("hlo", path, "--hlo").stdout


def test_hlo_from_standard_input():
    text = (HLO / "loop-cpu-0.12.txt").read_bytes()
    command = [sys.executable, "-m", "collc", "hlo", "-", "--mesh", "host=2,gpu=4"]
    run = subprocess.run(command, input=text, capture_output=True)
    assert run.returncode == 0, run.stderr
    assert b"result/device" in run.stdout and b"launch" in run.stdout


@pytest.mark.parametrize(
    "content, words",
    [
        (b"\x00\x01\x02", "is binary, and collc reads HLO as text"),
        (b"\xff\xfe\xfd", "is binary, and collc reads HLO as text"),
        (b" \n", "is empty"),
        (b"module @jit_f {\n}\n", "not HLO text but MLIR"),
        (b"%CUT", "ends inside a computation"),
    ],
)
def test_hlo_that_is_none(refused, tmp_path, content, words):
    if content == b"%CUT":
        content = (HLO / "loop-cuda-0.12.txt").read_bytes()
        content = content[: content.rindex(b"ROOT")]
    (tmp_path / "x.txt").write_bytes(content)
    said = refused("hlo", str(tmp_path / "x.txt"))
    assert str(tmp_path / "x.txt") in said and words in said


def test_hlo_that_is_not_there(refused, tmp_path):
    assert "there is no file nowhere.txt" in refused("hlo", "nowhere.txt")
    assert "is a folder" in refused("hlo", str(tmp_path))
    path = str(HLO / "loop-cuda-0.12.txt")
    assert "4 devices" in refused("hlo", path, "--mesh", "gpu=4")
    assert "Drop one" in refused("hlo", path, "--json", "--hlo")


# ---- compile: what is refused without a pod ---------------------------------------------------------


@pytest.mark.parametrize(
    "args, words",
    [
        (["nowhere.py:f"], "there is no file nowhere.py"),
        (["s:step", "--split", "x"], "A step of a file is named with its ending, as s.py:step"),
        (["s.py"], "'s.py' names no step. Write path/to/file.py:function"),
        (["s.py:a.b"], "names no step"),
        (["s.py:step", "--json", "--hlo"], "Drop one of them"),
        (["s.py:step", "--hlo", "--against", "blueconnect"], "--against compiles two"),
        (["s.py:plain", "--split", "x"], "--split has no effect without --plan"),
        (["s.py:plain", "--batch-size", "3"], "--batch-size has no effect on the step of a file"),
        (["s.py:plain", "--seq", "3"], "--seq has no effect on the step of a file"),
        (["s.py:plain", "--against", "native"], "--against native has no effect without --plan"),
        (["s.py:step", *PLAN, "--split", "x,"], "'' is no name"),
        (["s.py:step", "--shapes", "a,b"], "name one factory"),
        (
            ["transformer:tiny", "--donate", "model"],
            "--donate has no effect on the step of a model",
        ),
        (["transformer:tiny", "--shapes", "f"], "--shapes has no effect on the step of a model"),
        (
            ["s.py:step", *PLAN, "--against", "blueconnect", "--xla"]
            + ["xla_gpu_all_reduce_blueconnect_num_devices_per_host=4"],
            "Drop it from --xla",
        ),
    ],
)
def test_options_without_effect_and_names_of_nothing(refused, steps, args, words):
    assert words in refused("compile", *args, *POD)


# ---- compile: with a pod ----------------------------------------------------------------------------


@needs_pod
@pytest.mark.parametrize(
    "args, words",
    [
        (["s.py:nope", *POD], "s.py has no function 'nope'. Known:"),
        (["s.py:number", *POD], "s.py: number is 3, but a step is a function"),
        (["broken.py:f", *POD], "broken.py:3: it cannot be loaded: ZeroDivisionError"),
        (["syntax.py:f", *POD], "syntax.py:1: it cannot be loaded: SyntaxError"),
        (["alone.py:f", *POD], "alone.py does not say which shapes f takes"),
        (["s.py:step", *POD, "--shapes", "zz"], "--shapes: s.py has no function 'zz'"),
        (["s.py:step", *POD, "--shapes", "s_seven"], "s_seven returns 7, but has to return"),
        (["s.py:step", *POD, "--shapes", "s_two"], "s_two needs mesh, n, but it is called"),
        (["s.py:step", *POD, "--shapes", "s_text"], "s.py: w is a str"),
        (["s.py:step", *POD, "--shapes", "s_name"], "s_name gives 'y', which is no argument of"),
        (["s.py:step", *POD, "--shapes", "s_few"], "s_few does not give x"),
        (["s.py:step", *POD, "--shapes", "s_many"], "s_many gives 3 arguments"),
        (["s.py:step", *POD, "--shapes", "s_raises"], "s_raises cannot make the shapes: Zero"),
        (["s.py:step", *POD, "--shapes", "s_other"], "w is sharded over another mesh"),
        (["s.py:step", *POD, "--shapes", "s_bare"], "x is sharded by a PartitionSpec alone"),
        (["s.py:step", *POD, *PLAN, "--split", "x", "--shapes", "s_scalar"], "it is a scalar"),
        (["s.py:step", *POD], "Here a plan is given as --plan gpu=ring,host=tree"),
        (
            ["s.py:plain", "--pod", "h100:1x8", "--against", "blueconnect"],
            "--against blueconnect has no effect on one host",
        ),
        (["s.py:raises", *POD], "raises does not trace: TracerBoolConversionError"),
        (["s.py:plain", *POD, "--donate", "q"], "--donate names 'q', which is no argument of"),
        (["s.py:jitted", *POD, *PLAN, "--split", "x"], "is jitted already"),
        (["s.py:step", *POD, *PLAN], "s.py:step has no argument named batch"),
        (["s.py:step", *POD, *PLAN, "--split", "z"], "--split names 'z'"),
        (["s.py:forgets", *POD, *PLAN, "--split", "x"], "returned as replicated, but it differs"),
        (["s.py:step", *POD, "--plan", "gpux=ring"], "Did you mean gpu?"),
        (["s.py:step", *POD, "--plan", "gpu"], "'gpu' is no axis with its schedule"),
        (["s.py:step", *POD, "--plan", "gpu=ring,gpu=tree"], "axis gpu is there twice"),
        (["s.py:step", *POD, "--plan", "gpu=auto"], "auto measures on the devices"),
        (["s.py:step", *POD, "--plan", "nowhere.txt"], "cannot read the plan nowhere.txt"),
        (["s.py:step", "--pod", "x100:2x8"], "there is no target 'x100'"),
        (["s.py:step", *POD, "--mesh", "host=2,gpu=4"], "hold 8 GPUs"),
        (["s.py:step", *POD, "--xla", "xla_foo=1"], "knows no flag xla_foo"),
        (["transformer:huge", *POD], "no model size 'huge'"),
    ],
)
def test_what_is_refused(refused, steps, args, words):
    assert words in refused("compile", *args)


@needs_pod
def test_the_example(cli):
    result = cli("compile", EXAMPLE, *POD, *PLAN, "--donate", "params", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["pod"] == "h100" and found["mesh"] == {"host": 2, "gpu": 8}
    assert found["module"] == "jit_train_step" and found["unplanned"] == 0
    assert set(found["counts"]) == {"collective-permute"}
    assert {c["by"] for c in found["collectives"]} == {"plan"}
    assert found["memory"]["aliased"] == 4 * 256 * 256 * 2, "params take the memory of params"
    assert list(found["seconds"]) == ["trace", "lower", "compile", "receipt"]
    assert found["flops"] == 3 * 4 * 2 * 32 * 256 * 256, "forward, and twice as much backward"


@needs_pod
def test_a_plain_step_and_its_hlo(cli, steps):
    result = cli("compile", "s.py:plain", *POD)
    assert result.exit_code == 0, result.output
    assert "jit_plain on h100, 16 GPUs: host=2, gpu=8" in result.stdout
    assert "all-reduce" in result.stdout and "network" in result.stdout
    (steps / "plain.hlo").write_text(cli("compile", "s.py:plain", *POD, "--hlo").stdout)
    again = cli("hlo", "plain.hlo", *POD)
    assert again.exit_code == 0, again.output
    one, other = (r.stdout.partition("Differences")[0] for r in (result, again))
    kept = ("NVLink", "network", "compute", "collectives")
    for line in one.splitlines():
        assert not line.startswith(kept) or line in other, line


@needs_pod
def test_against_blueconnect_and_native(cli, steps):
    args = ("compile", "s.py:step", *POD, *PLAN, "--split", "x", "--json")
    for other, counts in (
        ("native", {"all-reduce": 1}),
        ("blueconnect", {"reduce-scatter": 1, "all-reduce": 1, "all-gather": 1}),
    ):
        found = json.loads(cli(*args, "--against", other).stdout)
        assert found[other]["counts"] == counts
        assert set(found["step"]["counts"]) == {"collective-permute"}
    table = cli(*args[:-1], "--against", "native").stdout
    assert "in flight at most" in table and "native/step" in table


@needs_pod
def test_a_step_that_does_not_fit(cli, steps):
    result = cli("compile", "s.py:large", "--pod", "h100:1x2")
    assert result.exit_code == 1
    assert "memory       128.0 GiB of 79.1 GiB (162%" in result.stdout
    assert "the step needs 137,438,953,472 bytes (128.0 GiB) on each h100" in result.stderr
    assert "64.0 GiB  f32[32768,524288]  x" in result.stderr


@needs_pod
def test_a_saved_plan_and_nnx_modules(cli, steps, monkeypatch):
    import collc

    collc.plan(collc.pod("h100", hosts=2), {"host": "tree", "gpu": "ring"}).save("plan.txt")
    (steps / "n.py").write_text("""
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import collc


def step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(batch) ** 2))(model)
    optimizer.update(model, collc.pmean(grads))
    return collc.pmean(loss)


def step_shapes(mesh):
    def fresh():
        model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    return (*nnx.eval_shape(fresh), jax.ShapeDtypeStruct((mesh.size, 16), jnp.float32))
""")
    result = cli("compile", "n.py:step", *POD, "--plan", "plan.txt", "--donate", "model,optimizer")
    assert result.exit_code == 0, result.output
    assert "in donated arguments" in result.stdout
    assert "ring.reduce_scatter @ gpu" in result.stdout


@needs_pod
def test_a_model_by_name(cli):
    result = cli("compile", "transformer:tiny", *POD, "--seq", "16", "--batch-size", "1")
    assert result.exit_code == 0, result.output
    assert "jit_train_step on h100, 16 GPUs" in result.stdout and "all-reduce" in result.stdout
