"""`train_ddp --zero1`: a part of the optimizer's state on each rank, and the same weights."""

import shutil

import pytest

from spec_tests.reference_tests.launch import run
from spec_tests.reference_tests.training import (
    BASELINE,
    DDP,
    SMALL,
    steps,
    trained_ranks,
    weights,
)

SAVES = ("--checkpoint-dir", "saved", "--save-every", 1)


def test_a_sharded_run_ends_with_the_same_bits_and_saves_for_a_plain_one(data, tmp_path):
    common = (*SMALL, "--max-norm", 1, "--data", data)
    sharded, plain = tmp_path / "sharded", tmp_path / "plain"

    trained_ranks(DDP, *common, "--zero1", *SAVES, "--out", sharded, folder=tmp_path)
    trained_ranks(DDP, *common, "--out", plain, folder=tmp_path)

    assert len({*weights(sharded, "ddp_bucketed"), *weights(plain, "ddp_bucketed")}) == 1
    lines = [steps(out, "ddp_bucketed") for out in (sharded, plain)]
    for ours, theirs in zip(*lines, strict=True):
        for key in ("step", "loss", "lr", "grad_norm", "tokens"):
            assert ours[key] == theirs[key], key

    # One rank, without sharding, goes on where two sharded ones had been after two steps.
    shutil.rmtree(tmp_path / "saved" / "step-00000003")
    alone = run(BASELINE, *common, *SAVES, "--out", tmp_path, folder=tmp_path)

    assert alone.status == 0, alone.err
    assert "going on after step 2" in alone.out
    (last,) = steps(tmp_path)
    assert last["step"] == 3
    assert last["loss"] == pytest.approx(lines[1][-1]["loss"], rel=1e-6)
    assert last["grad_norm"] == pytest.approx(lines[1][-1]["grad_norm"], rel=1e-5)
