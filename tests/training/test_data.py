"""The corpus, its entropies, and batches that are functions of (seed, step)."""

import math

import numpy as np
import pytest

from collc.errors import DataError
from collc.training.lm import data


def as_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


@pytest.fixture
def library(tmp_path):
    """A small library: 40 files that count, and some that do not."""
    for i in range(40):
        (tmp_path / f"module{i}.py").write_text(f"value = {i}\n")
    for name in (
        "test/test_x.py",
        "site-packages/other.py",
        "encodings/cp1.py",
        "json/tests/t.py",
        "_sysconfigdata_x.py",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("NO\n")
    (tmp_path / "json" / "decoder.py").write_text("yes\n")
    (tmp_path / "notes.txt").write_text("NO\n")
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere")
    return tmp_path


def test_the_corpus_is_split_by_file_and_in_order(library):
    corpus = data.corpus(library, smallest=64)
    text = {True: "", False: ""}
    for path in sorted(
        ["json/decoder.py", *(f"module{i}.py" for i in range(40))],
        key=lambda name: ("/" in name, name),
    ):
        text[data.held_out(path)] += (library / path).read_text()
    assert corpus.train.tobytes().decode() == text[False]
    assert corpus.validation.tobytes().decode() == text[True]
    assert corpus.train.dtype == corpus.validation.dtype == np.uint8
    assert corpus.train_files + corpus.validation_files == 41 and corpus.validation_files > 0


def test_the_digest_knows_the_text(library):
    before = data.corpus(library, smallest=64)
    assert data.corpus(library, smallest=64).digest == before.digest
    (library / "module3.py").write_text("value = 4\n")
    assert data.corpus(library, smallest=64).digest != before.digest


def test_too_little_text_is_refused(library):
    with pytest.raises(
        DataError, match=r"Found [\d,]+ bytes .* at least 65,536 and 4,096 are needed"
    ):
        data.corpus(library)


def test_the_standard_library_is_enough():
    corpus = data.corpus()
    assert len(corpus.train) > 2_000_000 and len(corpus.validation) > 100_000
    entropy = data.entropy(corpus.train, corpus.validation)
    assert 2.0 < entropy.bigram < 2.8 < entropy.unigram < 3.5


def test_entropies_by_hand():
    train, validation = as_bytes("aab"), as_bytes("ab")
    a, b = 3 / 259, 2 / 259
    found = data.entropy(train, validation)
    assert math.isclose(found.unigram, -(math.log(a) + math.log(b)) / 2)
    assert math.isclose(
        found.bigram, -math.log((1 + b) / 3)
    )  # after the two a's of the pairs came one a and one b


def test_unseen_bytes_cost_much_but_not_infinity():
    entropy = data.entropy(as_bytes("ab" * 1000), as_bytes("zq"))
    assert 6 < entropy.unigram < entropy.bigram + 1 < 20


def test_batches_are_functions_of_seed_and_step():
    text = np.random.default_rng(0).integers(256, size=5000, dtype=np.uint8)
    one = data.batch(text, seed=1, step=7, size=8, seq=32)
    assert one.shape == (8, 33) and one.dtype == np.uint8
    np.testing.assert_array_equal(one, data.batch(text, seed=1, step=7, size=8, seq=32))
    assert (one != data.batch(text, seed=1, step=8, size=8, seq=32)).any()
    assert (one != data.batch(text, seed=2, step=7, size=8, seq=32)).any()
    assert all(bytes(row) in text.tobytes() for row in one)


def test_a_batch_can_reach_both_ends_of_the_text():
    text = np.arange(10, dtype=np.uint8)
    starts = {int(row[0]) for step in range(50) for row in data.batch(text, 0, step, 8, 8)}
    assert starts == {0, 1}


def test_validation_windows_predict_each_byte_at_most_once():
    text = np.arange(250, dtype=np.uint8)
    windows = data.validation_batches(text, size=4, seq=10)
    assert windows.shape == (6, 4, 11)
    targets = windows[..., 1:].ravel()
    assert (
        len(set(targets.tolist())) == len(targets)
        and targets[-1] == 249
        and (np.diff(targets.astype(int)) > 0).all()
    )
    assert data.validation_batches(text, size=4, seq=10, limit=2).shape == (2, 4, 11)
    assert data.validation_batches(text, size=64, seq=10).shape == (1, 64, 11)


@pytest.mark.parametrize("seq", [0, 10])
def test_windows_that_cannot_be_cut_are_refused(seq):
    text = np.arange(10, dtype=np.uint8)
    for cut in (
        lambda: data.batch(text, 0, 0, 2, seq),
        lambda: data.validation_batches(text, 2, seq),
    ):
        with pytest.raises(DataError, match="cannot be cut from a text of 10"):
            cut()


def test_a_batch_divides_over_the_devices():
    data.check_divides(24, 8)
    for size in (0, -8, 12, 7):
        with pytest.raises(
            DataError, match=f"batch of {size} does not divide over 8 devices.*Use a multiple of 8"
        ):
            data.check_divides(size, 8)
