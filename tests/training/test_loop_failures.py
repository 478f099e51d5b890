"""A run that fails: what it still saves, what its error says."""

import pytest

from collc.errors import CheckpointError, CollcError, StepError
from collc.training.checkpoints import checkpoint

from .counting import Fake, at_step, lines, refuse, saved, told, values


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    fake = Fake()
    return folder, fake, fake.run(folder)


def test_a_validation_that_is_not_finite_stops(tmp_path):
    with pytest.raises(StepError, match=r"validation loss of step 5 is nan. The last .* step 4"):
        Fake(validation=float("nan")).run(tmp_path)
    assert saved(tmp_path) == [4] and lines(tmp_path)[-1]["step"] == 5


def test_a_validation_that_is_not_finite_loses_no_checkpoint_that_is_due(tmp_path):
    with pytest.raises(StepError, match=r"validation loss of step 5 is nan. The last .* step 5"):
        Fake(validation=float("nan")).run(tmp_path, save_every=5)
    assert saved(tmp_path) == [5]
    again = Fake()
    again.run(tmp_path, resume=True)
    assert again.evaluated == [5, 10] and again.steps == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_and_saves_no_more(tmp_path, loss):
    with pytest.raises(
        StepError, match=rf"loss of step 6 is {loss}. The last checkpoint is that of step 4"
    ):
        Fake(losses={5: loss}).run(tmp_path)
    assert saved(tmp_path) == [4]
    assert told(tmp_path) == "StepError"


def test_where_nothing_is_written_no_checkpoint_is_spoken_of(tmp_path):
    for fake in (Fake(losses={2: float("nan")}), Fake(validation=float("inf"))):
        with pytest.raises(StepError, match=r"is (nan|inf)") as error:
            fake.run(None, save_every=None, keep=None)
        assert "checkpoint" not in str(error.value)
    with pytest.raises(StepError, match=r"loss of step 3 is nan. There is no checkpoint yet. Look"):
        Fake(losses={2: float("nan")}).run(tmp_path)


def ends(kind):
    """An error of that kind in place of batch 8, the one after the step of a checkpoint."""

    def data(t):
        if t == 8:
            raise kind("no more")
        return t

    return data


@pytest.mark.parametrize("evaluate_every", [4, 5])
def test_data_that_fails_loses_nothing_of_the_step_before(whole, tmp_path, evaluate_every):
    """It is asked one batch ahead."""
    seen, fake = [], Fake(data=ends(OSError))
    with pytest.raises(OSError, match="no more") as error:
        fake.run(tmp_path, evaluate_every=evaluate_every, callbacks=[lambda e: seen.append(e.step)])
    assert error.value.__notes__ == [
        "collc.fit: 8 steps are finished. The last checkpoint is that of step 8."
    ]
    assert saved(tmp_path) == [4, 8] and seen == list(range(1, 9))
    assert fake.evaluated == ([4, 8] if evaluate_every == 4 else [5])
    assert told(tmp_path) == "OSError"
    Fake().run(tmp_path, resume=True)
    if evaluate_every == 5:
        assert values(tmp_path) == values(whole[0])


@pytest.mark.parametrize(
    "fake, callbacks",
    [
        (Fake(data=iter(range(7))), []),
        (Fake(), [at_step(7, refuse)]),
        (Fake(), [at_step(7, lambda event: event.switch("other"))]),
    ],
)
def test_what_is_finished_is_saved_before_an_error(tmp_path, fake, callbacks):
    with pytest.raises((OSError, CollcError)) as error:
        fake.run(tmp_path, callbacks=callbacks)
    assert "7 steps are finished. The last checkpoint is that of step 7" in error.value.__notes__[0]
    assert saved(tmp_path) == [4, 7] and told(tmp_path) == type(error.value).__name__


def test_numbers_that_are_not_finite_are_not_saved_when_a_callback_sees_them(tmp_path):
    fake = Fake(losses={5: float("nan")})
    with pytest.raises(StepError, match=r"loss of step 6 is nan. The last checkpoint .* step 4"):
        fake.run(tmp_path, callbacks=[at_step(6, lambda event: event.metrics)])
    assert saved(tmp_path) == [4]


def test_an_error_says_that_the_disk_is_full_too(tmp_path, monkeypatch):
    def full(*args):
        raise CheckpointError("No space left on device")

    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(OSError, match="no more") as error:
        Fake().run(tmp_path, callbacks=[at_step(3, refuse)])
    assert error.value.__notes__ == [
        "collc.fit: step 3 could not be saved: No space left on device",
        "collc.fit: 3 steps are finished. There is no checkpoint yet.",
    ]
