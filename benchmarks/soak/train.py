"""The training that has to live through everything: a small model, data by step, and what proves it.

    python train.py FOLDER NOTES STEPS ROWS SEED WATCHDOG PAUSE

In NOTES each process leaves ``HOST.at``, where it is, ``HOST.samples``, a line for each step with the
samples that it consumed, and at the end ``HOST.end``, a digest of its parameters.
"""

import hashlib
import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import collc
from collc.runtime.place import place
from collc.runtime.watchdog.watchdog import Watchdog
from collc.training.fitting import fit as fitting

BATCH, SAVE_EVERY, START_S = 12, 20, 30.0
WIDTHS = (16, 48, 32, 1)
POSITION = 48  # bytes of the file that says where a process is


def parameters(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    sizes = pairwise(WIDTHS)
    return {f"w{i}": rng.normal(0, a**-0.5, (a, b)).astype("f4") for i, (a, b) in enumerate(sizes)}


def samples(seed: int, rows: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng((seed, 1)).normal(size=(rows, WIDTHS[0])).astype(np.float32)
    return {"x": x, "y": np.sin(2 * x.sum(1)), "id": np.arange(rows, dtype=np.int32)}


def train_step(plan: collc.Plan, optimizer: Any) -> Any:
    @jax.jit
    @collc.schedule(plan, batch="batch")
    def step(state: Any, batch: Any) -> Any:
        params, opt = state

        def loss_of(params: Any) -> Any:
            hidden = batch["x"]
            for i in range(len(params) - 1):
                hidden = jnp.tanh(hidden @ params[f"w{i}"])
            return jnp.mean(((hidden @ params[f"w{len(params) - 1}"])[:, 0] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt = optimizer.update(collc.pmean(grads), opt, params)
        return (optax.apply_updates(params, updates), opt), collc.pmean(loss)

    return step


def follow(path: Path, attempt: int) -> None:
    """Has fit's watchdog leave each beat in a file too, for the one who chooses the moments."""
    file = os.open(path, os.O_CREAT | os.O_WRONLY)

    class Followed(Watchdog):
        def beat(self, step: int, phase: str) -> None:
            super().beat(step, phase)
            os.pwrite(file, f"{attempt} {step} {phase}".ljust(POSITION).encode(), 0)

    fitting.Watchdog = Followed  # pyright: ignore


def digests(state: Any) -> list[str]:
    """Of each copy of the state that this process holds: they all have to be the same."""
    leaves = jax.tree.leaves(state)
    found = []
    for device in jax.local_devices():
        copies = [s.data for x in leaves for s in x.addressable_shards if s.device == device]
        whole = b"".join(np.asarray(copy).tobytes() for copy in copies)
        found.append(hashlib.sha256(whole).hexdigest())
    return found


def main(
    folder: str, notes: str, steps: str, rows: str, seed: str, watchdog: str, pause: str
) -> None:
    mesh = collc.init(timeout_s=START_S)
    here = place()
    assert here is not None
    follow(Path(notes, f"{here.host}.at"), here.restarts)
    plan = collc.plan(mesh, {"gpu": "native", "host": "ring"})
    batches = collc.feed.batches(samples(int(seed), int(rows)), BATCH, seed=int(seed))
    loaded: dict[int, list[int]] = {}

    def load(t: int, rows: slice) -> Any:
        time.sleep(float(pause) / 2)  # so that a step lasts long enough to be hit in its phases
        batch = batches.at(t, rows)
        loaded.setdefault(t, []).extend(batch["id"].tolist())
        return batch

    with Path(notes, f"{here.host}.samples").open("a", encoding="utf-8") as log:

        def consumed(event: Any) -> None:
            row = {"attempt": here.restarts, "step": event.step, "ids": loaded.pop(event.step - 1)}
            print(json.dumps(row), file=log, flush=True)
            time.sleep(float(pause) / 2)

        optimizer, params = optax.adam(0.01), parameters(int(seed))
        done = collc.fit(
            train_step(plan, optimizer), (params, optimizer.init(params)),
            collc.feed.local(load, BATCH, plan),
            steps=int(steps), folder=folder, resume=True, save_every=SAVE_EVERY,
            callbacks=[consumed], profile=0, watchdog=float(watchdog),
        )  # fmt: skip
    Path(notes, f"{here.host}.end").write_text(json.dumps(digests(done.state)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
