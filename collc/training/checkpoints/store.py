"""What Orbax is given a folder as, and whether its store there holds all that was written."""

import json
import math
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tensorstore as ts
from etils import epath

# Orbax reads a path as a pattern, its store takes "\" for "/", and neither takes bytes of no encoding.
_MISREAD = re.compile(r"[\[\]*?\\\ud800-\udfff]")


@contextmanager
def as_orbax_reads(folder: Path) -> Iterator[epath.Path]:
    """A path of a folder that Orbax takes literally: its own, or else a link to it elsewhere."""
    path = folder.absolute()
    if not _MISREAD.search(str(path)):
        yield epath.Path(path)
        return
    with tempfile.TemporaryDirectory(prefix="collc-") as elsewhere:
        link = Path(elsewhere) / folder.name
        link.symlink_to(path, target_is_directory=True)
        yield epath.Path(link)


def lacking(state: epath.Path, arrays: Mapping[str, Any]) -> str:
    """What the store below `state` lacks of `arrays`, by name, in words; "" if it has all.

    What Orbax does not find when it merges the files of all processes, it leaves out and goes on.
    """
    # See https://google.github.io/tensorstore/kvstore/ocdbt and driver/zarr, Orbax's format.
    base = {"driver": "file", "path": f"{state}/"}
    store = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    keys = [key.decode() for key in store.list().result()]
    parts = Counter(key.rpartition("/")[0] for key in keys)
    headers = {name: store.read(f"{name}/.zarray") for name in arrays if parts[name]}
    if gone := [name for name in arrays if name not in headers]:
        return f"{gone[0]} ({len(gone)} of {len(arrays)} arrays are missing)"
    for name, x in arrays.items():
        header = json.loads(headers[name].result().value)
        shape, chunks = header["shape"], header["chunks"]
        if shape != list(x.shape):
            return f"{name} of shape {list(x.shape)}, and has one of {shape}"
        wanted = math.prod(-(-n // k) for n, k in zip(shape, chunks, strict=True))
        if (found := parts[name] - 1) != wanted:
            return f"{wanted - found} of the {wanted} parts of {name}"
    return ""
