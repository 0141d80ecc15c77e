"""Runs that stop and go on: killed or told to stop, the same command ends with the same weights."""

import os
import signal

import pytest

from spec_tests.reference_tests.launch import run, run_ranks, start
from spec_tests.reference_tests.training import (
    BASELINE,
    DDP,
    SMALL,
    after_steps,
    steps,
    summary,
    trained,
    weights,
)

STEPS = ("--steps", 20, "--save-every", 1)
INTERRUPTED = 4


def flags(data, folder, *more):
    return (*SMALL, *STEPS, "--data", data, "--out", folder, "--checkpoint-dir", "saved", *more)


@pytest.fixture(scope="session")
def whole(data, tmp_path_factory):
    """The fingerprint of the weights of a run that was not stopped."""
    folder = tmp_path_factory.mktemp("whole")
    trained(data, folder, *STEPS)
    return summary(folder)["weights_sha256"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize("mode", ["--no-async-save", "--async-save"])
def test_a_run_that_was_stopped_goes_on_to_the_same_weights(data, whole, tmp_path, number, mode):
    arguments = flags(data, tmp_path, mode)
    started = start(BASELINE, arguments, folder=tmp_path)
    after_steps(started, tmp_path, 3)
    os.kill(started.pid, number)
    stopped = started.wait()

    again = run(BASELINE, *arguments, folder=tmp_path)

    if number == signal.SIGTERM:
        stopped.require(INTERRUPTED, "told to stop; saved after step")
    assert "going on after step" in again.out
    assert summary(tmp_path)["weights_sha256"] == whole
    assert [line["step"] for line in steps(tmp_path)] == list(range(1, 21))
    assert not list((tmp_path / "saved").glob(".*"))


def test_two_ranks_go_on_from_one(data, whole, tmp_path):
    begun = start(BASELINE, flags(data, tmp_path), folder=tmp_path)
    after_steps(begun, tmp_path, 2)
    os.kill(begun.pid, signal.SIGTERM)
    begun.wait().require(INTERRUPTED)

    ranks = run_ranks(DDP, *flags(data, tmp_path), folder=tmp_path)

    assert "going on after step" in ranks[0].out
    assert len(set(weights(tmp_path, "ddp_bucketed"))) == 1
    assert steps(tmp_path, "ddp_bucketed")[-1]["step"] == 20


def test_what_is_done_stays_done_and_other_settings_are_refused(data, tmp_path):
    run(BASELINE, *flags(data, tmp_path, "--keep", 2), folder=tmp_path)
    again = run(BASELINE, *flags(data, tmp_path), folder=tmp_path)
    other, says = flags(data, tmp_path, "--learning-rate", 1), "learning_rate 1.0 (saved: 0.0003)"
    run(BASELINE, *other, folder=tmp_path, status=1, says=says)

    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        "step-00000019",
        "step-00000020",
    ]
    assert "going on after step 20" in again.out
