"""The commands on a GPU: what the allocator kept, what did not fit, what ran at once."""

import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_tests.tests.reference.training import SMALL, steps
from spec_tests.tests.rig.helpers import python

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = ("--device", "cuda")
NUM_RANKS = "--nproc-per-node="


def ran(*words: object) -> str:
    """Run `python -m ...` to its end, and return what it printed."""
    ended = python("-m", *map(str, words))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def torchrun(num_ranks: int, *words: object) -> str:
    return ran("torch.distributed.run", "--standalone", f"{NUM_RANKS}{num_ranks}", "-m", *words)


def memory(folder: Path, *words: object) -> dict[str, Any]:
    """What a step of GPT-2 small takes, predicted and measured."""
    size = ("--batch-size", 4, "--sequence-length", 512)
    ran("solution.memory_analysis", *CUDA, *size, "--out", folder, *words)
    return json.loads((folder / "memory.json").read_text())


def test_the_snapshot_opens_and_holds_our_allocations(tmp_path: Path):
    measured = memory(tmp_path, "--snapshot")["measured"]
    snapshot = pickle.loads((tmp_path / "memory_snapshot.pickle").read_bytes())
    living = sum(segment["allocated_size"] for segment in snapshot["segments"])
    assert living >= measured["parameters"] + measured["optimizer"]
    events = [event for device in snapshot["device_traces"] for event in device]
    ours = [
        event["size"]
        for event in events
        if event["action"] == "alloc"
        and any("solution/models" in frame["filename"] for frame in event.get("frames", ()))
    ]
    assert sum(ours) >= measured["activations"] > 0


def test_the_measured_peak_and_what_is_reserved_are_near_the_prediction(tmp_path: Path):
    found = memory(tmp_path)
    peak, measured = found["predicted"]["peak"], found["measured"]
    # Workspaces of cuBLAS are no tensors; blocks of the allocator are larger than what they hold.
    assert 0.9 * peak <= measured["peak"] <= 1.1 * peak
    assert measured["peak"] <= measured["reserved"] <= 1.5 * peak


def test_a_batch_that_does_not_fit_is_a_row_and_the_next_one_runs(tmp_path: Path):
    sizes = (1, 65_536, 2)  # whose first tensor of activations has 206 GB: no one else runs out
    flags = ("--batch-size", 1, "--steps", 3, "--out", tmp_path)
    said = ran("solution.throughput", *CUDA, *flags, "--batch-sizes", *sizes)
    rows = json.loads((tmp_path / "throughput.json").read_text())["sweep"]
    assert [(row["batch_size"], row["is_oom"]) for row in rows] == [
        (size, size == 65_536) for size in sizes
    ]
    assert "out of memory" in said


def test_the_three_scripts_train_alike_on_one_rank(data: Path, tmp_path: Path):
    flags = (*SMALL, *CUDA, "--data", data, "--out", tmp_path)  # the last --device counts
    ran("solution.train_baseline", *flags)
    torchrun(1, "solution.train_ddp", *flags)
    torchrun(1, "solution.train_fsdp", *flags)
    names = ("baseline", "ddp_bucketed", "fsdp_full_shard")
    first, *others = ([line["loss"] for line in steps(tmp_path, name)] for name in names)
    assert len(first) == 3
    assert all(map(math.isfinite, first))
    for losses in others:
        assert losses == pytest.approx(first, rel=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL has two ranks on two GPUs")
def test_fsdp_computes_while_it_communicates(data: Path, tmp_path: Path):
    model = ("--preset", "small", "--vocab-size", 64, "--sequence-length", 512)
    size = ("--global-batch-size", 8, "--micro-batch-size", 2, "--steps", 5)
    traces = tmp_path / "traces"
    recorded = ("--profile-steps", 1, "--traces", traces, "--data", data, "--out", tmp_path)
    torchrun(2, "solution.train_fsdp", *model, *size, *CUDA, *recorded)
    ran("solution.analyze_traces", traces, "--out", tmp_path / "analysis")
    found = json.loads((tmp_path / "analysis" / "traces.json").read_text())["setups"]
    for rank in found["fsdp_full_shard"]:
        assert rank["device"] == "cuda"
        assert rank["total"]["overlap_us"] > 0
