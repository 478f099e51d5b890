"""Text that every machine has: the sources of Python's own standard library, as bytes.

Nothing is downloaded and no reader has state: a batch is a function of (seed, step), so a resumed
run sees exactly the batches that it would have seen.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from collc.errors import DataError

# Other people's code; tests; what is generated or prose (tables of encodings, pydoc's topics) and
# would swamp the split; lib2to3, which is gone from newer Pythons.
SKIPPED_FOLDERS = frozenset(
    "site-packages dist-packages test tests idle_test __pycache__ "
    "encodings pydoc_data lib2to3 __phello__".split()
)
SKIPPED_FILES = ("_sysconfigdata", "__phello__")  # prefixes: generated for one machine
VALIDATION_SHARE = 10  # one file in ten
SMALLEST = 64 * 1024  # bytes of training text below which a model learns nothing worth printing


@dataclass(frozen=True, eq=False)
class Corpus:
    """Two texts as flat uint8 arrays, how many files each has, and a hex digest of both."""

    train: np.ndarray
    validation: np.ndarray
    train_files: int
    validation_files: int
    digest: str


@dataclass(frozen=True)
class Entropy:
    """What counting models pay per byte of the validation text, in nats."""

    unigram: float
    bigram: float


def sources(root: Path) -> Iterator[Path]:
    """The .py files under `root` that make the corpus, in the same order everywhere."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS)
        for name in sorted(files):
            if name.endswith(".py") and not name.startswith(SKIPPED_FILES):
                yield Path(folder, name)


def held_out(name: str) -> bool:
    """Whether a file, by its path relative to the root with "/" between, is in the validation text.

    >>> [held_out(name) for name in ("ast.py", "json/decoder.py", "argparse.py")]
    [False, False, False]
    """
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % VALIDATION_SHARE == 0


def corpus(root: str | os.PathLike[str] | None = None, smallest: int = SMALLEST) -> Corpus:
    """Read the standard library, or the .py files under `root`, split by file, nine to one.

    Files that cannot be read are skipped. The same files give the same corpus and digest on every
    machine; another Python has other files, and so another digest.

    Raises DataError if there are fewer than `smallest` bytes to train on or fewer than a sixteenth
    of that to validate on.
    """
    root = Path(root if root is not None else sysconfig.get_path("stdlib"))
    texts: dict[bool, list[bytes]] = {False: [], True: []}
    for path in sources(root):
        try:
            text = path.read_bytes()
        except OSError:
            continue
        if text:
            texts[held_out(path.relative_to(root).as_posix())].append(text)
    train, validation = b"".join(texts[False]), b"".join(texts[True])
    if len(train) < smallest or len(validation) < smallest // 16:
        raise DataError(
            f"Found {len(train):,} bytes of Python source to train on and {len(validation):,} to "
            f"validate on under {root}, but at least {smallest:,} and {smallest // 16:,} are "
            "needed. Use a Python whose standard library lies there as .py files (not zipped or "
            "compiled)."
        )
    digest = hashlib.sha256(len(train).to_bytes(8, "big") + train + validation).hexdigest()
    arrays = np.frombuffer(train, np.uint8), np.frombuffer(validation, np.uint8)
    return Corpus(*arrays, len(texts[False]), len(texts[True]), digest)


def entropy(train: np.ndarray, validation: np.ndarray) -> Entropy:
    """What two counting models, fitted on `train`, pay per byte of `validation`.

    - unigram: the cross-entropy of P(b) = (count(b) + 1) / (N + 256).
    - bigram: the cross-entropy of P(b | a) = (count(a b) + P(b)) / (count(a ·) + 1), a and b
      neighbours: the conditional entropy H(b_t | b_(t-1)), with one pseudo-count spread as the
      unigram says. The first byte has no neighbour and is left out.

    Counts come from `train` only and the mean is over `validation` only, so both are honest upper
    estimates of the entropies of that text, comparable with a model's validation loss. Both
    arguments are uint8 of one dimension.

    >>> coin = np.array([0, 1] * 5000, np.uint8)
    >>> found = entropy(coin, coin)
    >>> round(found.unigram, 1), round(found.bigram, 1)  # log 2, and nothing
    (0.7, 0.0)
    """
    if len(train) < 2 or len(validation) < 2:
        raise DataError(
            f"Entropies need two bytes of each text, but found {len(train)} and {len(validation)}."
        )
    single = np.bincount(train, minlength=256)
    unigram = (single + 1.0) / (len(train) + 256.0)
    pairs = np.bincount(train[:-1] * np.int64(256) + train[1:], minlength=256 * 256)
    pairs = pairs.reshape(256, 256)
    bigram = (pairs + unigram) / (pairs.sum(axis=1, keepdims=True) + 1.0)
    return Entropy(
        unigram=float(-np.log(unigram)[validation].mean()),
        bigram=float(-np.log(bigram)[validation[:-1], validation[1:]].mean()),
    )


def check_divides(batch: int, devices: int) -> None:
    """DataError if a batch's examples do not come out even over the devices."""
    if batch < 1 or batch % devices:
        nearest = max(devices, round(batch / devices) * devices)
        raise DataError(
            f"A batch of {batch} does not divide over {devices} devices: each device needs the "
            f"same number, at least one. Use a multiple of {devices}, for example {nearest}."
        )


def _windows(text: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    return text[starts[:, None] + np.arange(length)]


def _check_length(text: np.ndarray, length: int) -> None:
    if length < 2 or len(text) < length:
        raise DataError(
            f"A window of {length} bytes (seq + 1) cannot be cut from a text of {len(text):,}: it "
            "needs at least 2 and at most that. Choose another seq."
        )


def batch(text: np.ndarray, seed: int, step: int, size: int, seq: int) -> np.ndarray:
    """The batch of a step, a function of its arguments alone.

    Windows that begin anywhere in `text`: uint8 [size, seq + 1]. Raises DataError if none fits.
    """
    _check_length(text, seq + 1)
    random = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, step]))
    return _windows(text, random.integers(len(text) - seq, size=size), seq + 1)


def validation_batches(
    text: np.ndarray, size: int, seq: int, limit: int | None = None
) -> np.ndarray:
    """Windows evenly spread over `text`, in order: uint8 [batches, size, seq + 1].

    Each is to predict its last seq bytes, which no other window does. At most `limit` batches. If
    the text has fewer than `size` windows, they overlap to fill one batch. Raises DataError if none
    fits.
    """
    _check_length(text, seq + 1)
    whole = max(1, (len(text) - 1) // seq // size)
    count = (whole if limit is None else min(whole, limit)) * size
    starts = np.linspace(0, len(text) - seq - 1, count).astype(np.int64)
    return _windows(text, starts, seq + 1).reshape(-1, size, seq + 1)
