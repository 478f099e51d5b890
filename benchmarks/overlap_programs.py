"""What overlap.py compiles, layers and ways to reduce their gradients, and what to learn of it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

Flags = Mapping[str, bool | int | str]
LAYERS, WIDTH, HEADS, TOKENS, EXAMPLES = 4, 2048, 16, 1024, 8  # EXAMPLES: of a GPU
HOSTS, GPUS = 2, 8
PLANS: dict[str, tuple[dict[str, int], dict[str, str]]] = {
    "one": ({"data": HOSTS * GPUS}, {"data": "native"}),
    "levels": ({"host": HOSTS, "gpu": GPUS}, {"gpu": "native", "host": "native"}),
    "rings": ({"host": HOSTS, "gpu": GPUS}, {"gpu": "ring", "host": "tree"}),
    "halving": ({"host": HOSTS, "gpu": GPUS}, {"gpu": "halving", "host": "halving"}),
}
PLANS["joint"] = PLANS["levels"]
JOINT = "native.all_reduce @ (host, gpu)"  # what sync is given in the plan "joint"
KINDS = ("all_reduce", "all_gather", "reduce_scatter")
WHILE = "xla_gpu_enable_while_loop_unrolling"
# In XLA_FLAGS they have these names, too.
FLAGS: dict[str, Flags] = {
    "double buffer": {WHILE: "WHILE_LOOP_UNROLLING_DOUBLE_BUFFER"},
    "full unroll": {WHILE: "WHILE_LOOP_UNROLLING_FULL_UNROLL"},
    "in flight 4": {"xla_gpu_experimental_parallel_collective_overlap_limit": 4},
    "blueconnect": {"xla_gpu_all_reduce_blueconnect_num_devices_per_host": GPUS},
    "apart": {f"xla_gpu_{kind}_combine_threshold_bytes": 0 for kind in KINDS},
}


@dataclass(frozen=True)
class Program:
    """A train step. ``change``: the name of flags, or "unroll=2", what a reader may change."""

    plan: str
    scanned: bool = True
    sync: bool = True
    pieces: int = 1
    change: str = ""

    @property
    def name(self) -> str:
        layers = "scanned" if self.scanned else "unrolled"
        return f"{self.plan}, {layers}, {'sync' if self.sync else 'at the end'}, {self.pieces}"


def matrix() -> list[Program]:
    """All combinations, without flags."""
    return [
        Program(plan, scanned, sync, pieces)
        for plan in ("one", "levels", "rings")
        for scanned in (False, True)
        for sync in (False, True)
        for pieces in (1, 4)
    ]


def changed() -> list[Program]:
    """Scanned layers with sync, and what might change how they overlap."""
    tried = {
        "one": ("unroll=2", "pipelined", "not pipelined", "blueconnect"),
        "levels": (
            "unroll=2",
            "double buffer",
            "pipelined",
            "not pipelined",
            "in flight 4",
            "apart",
        ),
        "rings": ("unroll=2", "full unroll", "in flight 4"),
        "halving": ("",),
        "joint": ("",),
    }
    return [replace(Program(plan), change=c) for plan, changes in tried.items() for c in changes]


def flags(change: str) -> Flags:
    """The compile options of a change, in the names that this jax's XLA knows."""
    if change not in ("pipelined", "not pipelined"):
        return FLAGS.get(change, {})
    from collc.receipts.pods.flags import known_flags

    on = change == "pipelined"
    if f"xla_gpu_pipeline_{KINDS[0]}" in known_flags():
        mode = f"COLLECTIVE_PIPELINING_MODE_{'ON' if on else 'OFF'}"
        return {f"xla_gpu_pipeline_{kind}": mode for kind in KINDS}
    return {f"xla_gpu_enable_pipelined_{kind}": on for kind in KINDS}


# ---- the model ----------------------------------------------------------------------------------


def shapes() -> dict[str, tuple[int, int]]:
    """Of a layer's parameters: 96 MiB in bfloat16."""
    wide = 4 * WIDTH
    return {
        "qkv": (WIDTH, 3 * WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (WIDTH, wide),
        "down": (wide, WIDTH),
    }


def traced(program: Program) -> Any:
    """The step as ``jax.jit`` traces it; its parameters are donated."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    import collc

    axes, plan = PLANS[program.plan]
    mesh = collc.pod("h100", axes, hosts=HOSTS, gpus=GPUS)
    unroll = 2 if program.change == "unroll=2" else 1
    on = JOINT if program.plan == "joint" else None
    of_a_device = partial(loss, sync=program.sync, on=on, unroll=unroll)
    grad_fn = collc.value_and_grad(of_a_device, collc.plan(mesh, plan), microbatches=program.pieces)

    @partial(jax.jit, donate_argnums=0)
    def step(params: Any, batch: Any) -> Any:
        value, grads = grad_fn(params, batch)
        return jax.tree.map(lambda w, g: w - g, params, grads), value

    def of(shape: tuple[int, ...], spec: PartitionSpec) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    stacked = (LAYERS,) if program.scanned else ()
    layer = {name: of((*stacked, *shape), PartitionSpec()) for name, shape in shapes().items()}
    batch = of((mesh.size * EXAMPLES, TOKENS, WIDTH), PartitionSpec(tuple(axes)))
    return step.trace(layer if program.scanned else [layer] * LAYERS, batch)


def loss(params: Any, batch: Any, *, sync: bool, on: str | None, unroll: int) -> Any:
    """How far the stack is from the identity. params: stacked in a dict, or a list of layers."""
    import jax
    import jax.numpy as jnp

    import collc

    def one(x: Any, w: Any) -> tuple[Any, None]:
        w = collc.sync(w, on) if sync else w
        with jax.named_scope("attention"):
            x = x + attention(normed(x), w)
        with jax.named_scope("mlp"):
            return x + jnp.square(jax.nn.relu(normed(x) @ w["up"])) @ w["down"], None

    x = batch
    if isinstance(params, dict):
        x, _ = jax.lax.scan(one, x, params, unroll=unroll)
    else:
        for w in params:
            x, _ = one(x, w)
    return jnp.mean((x - batch).astype(jnp.float32) ** 2)


def normed(x: Any) -> Any:
    import jax.numpy as jnp
    from jax import lax

    y = x.astype(jnp.float32)
    return (y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def attention(x: Any, w: Any) -> Any:
    """Causal, [examples, tokens, width] to the same."""
    import jax
    import jax.numpy as jnp

    examples, tokens, width = x.shape
    size = width // HEADS
    q, k, v = jnp.moveaxis((x @ w["qkv"]).reshape(examples, tokens, 3, HEADS, size), 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) * size**-0.5
    scores = jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool)), scores, -jnp.inf)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(x.dtype), v)
    return mixed.reshape(x.shape) @ w["out"]


# ---- what the report says of them ---------------------------------------------------------------

# What to do, and the programs that show it: their hidden bytes follow the text.
ADVICE: tuple[tuple[str, tuple[Program, ...]], ...] = (
    (
        """
        **Layers in a scan, reduced at the end: all of it waits.** The loop is one operation to
        XLA, and the stacked gradients are complete only after it.
        """,
        (Program("one", sync=False),),
    ),
    (
        """
        **So give each layer's parameters to `collc.sync`.** Every turn of the loop then reduces
        its own layer, one native all-reduce for a parameter, and XLA runs them beside other
        products of the same turn: the gradients of weights, which nothing waits for, and the
        backward of the attention.
        """,
        (Program("one"),),
    ),
    (
        """
        **On a mesh of several axes give it one native all-reduce over all of them**, as *joint*
        does: `collc.sync(params, "native.all_reduce @ (host, gpu)")`.
        """,
        (Program("joint"),),
    ),
    (
        """
        **Unrolled layers need no sync**, as long as there are no micro-batches: XLA sees when a
        gradient is complete, wherever the program reduces it. Without sync, and with it.
        """,
        (Program("one", False, False), Program("one", False, True)),
    ),
    (
        """
        **With micro-batches everything needs sync.** They are a loop, and the sums are complete
        after it. `collc.value_and_grad` takes the last one out of the loop if there is a sync;
        only its products, a quarter here, can hide anything, and it costs memory (the last
        column). Unrolled without and with sync, then scanned.
        """,
        tuple(Program("one", s, y, 4) for s in (False, True) for y in (False, True)),
    ),
    (
        """
        **A turn of a loop waits for all that it starts**, so the last reductions of a layer do
        not run beside the layer before. XLA takes reduce-scatters over into the next turn by
        itself (*not pipelined* is without), the others if *pipelined*; `unroll=2` of
        `jax.lax.scan` makes two layers one turn. None of it is best with both versions of jax:
        look at the receipt. *levels* as it is, *not pipelined*, *pipelined*, *unroll=2*; and
        *one*, *pipelined*, which should be left alone.
        """,
        (
            Program("levels"),
            *(Program("levels", change=c) for c in ("not pipelined", "pipelined", "unroll=2")),
            Program("one", change="pipelined"),
        ),
    ),
    (
        """
        **A chain of collectives hides less than one.** Each waits for the one before, and XLA
        has one in flight. That holds for a plan in levels, and for XLA's own splitting. *one*
        with *blueconnect*.
        """,
        (Program("one", change="blueconnect"),),
    ),
    (
        """
        **Rounds in a loop hide nothing.** collc rolls the equal rounds of a ring into a loop,
        which is one operation to XLA: beside its permutes runs only the counter of the loop
        (*counters*). What is hidden of *rings* are messages of the tree. Unrolling the loop by
        a flag does not help, nor do more in flight. *rings* as it is, with *full unroll*, with
        *in flight 4*, and *halving*, whose rounds are no loop.
        """,
        (
            Program("rings"),
            *(Program("rings", change=c) for c in ("full unroll", "in flight 4")),
            Program("halving"),
        ),
    ),
)

GLOSSARY = """
*one*: one native all-reduce over one axis of all GPUs. *joint*: the same over two axes, which `sync` is
given. *levels*: plan gpu=native, host=native, that is a reduce-scatter, an all-reduce and an all-gather.
*rings*: gpu=ring, host=tree. *halving*: on both axes.

*end*: all gradients are reduced together. *sync*: each layer's parameters pass `collc.sync`.

*hidden*: MiB of results of collectives beside which a matrix product runs; *brief*: other kernels only;
*exposed*: nothing; as `collc compile` has it. *counters*: MiB of *brief* where those kernels write less
than 1 KiB, such as the counter of a loop, so where nothing is hidden.

*runs*: executions in a step. *products*: TFLOP of the matrix products beside what is hidden, once for
each collective that they are beside. *GiB*: memory of a GPU.
"""
