"""What tests of pods share: whether this Python can compile for one at all."""

import pytest

from collc.errors import PodError
from collc.receipts.pods import toolchain


@pytest.fixture(scope="session")
def pod():
    """`collc.pod`; the test is skipped, with the reason, where its extra is not installed."""
    import collc

    try:
        toolchain.ready()
    except PodError as e:
        pytest.skip(f"no pods here: {e}")
    return collc.pod
