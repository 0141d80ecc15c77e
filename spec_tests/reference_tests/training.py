"""Runs of the reference's training commands, small enough for a test, and what they leave."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spec_tests.reference_tests.launch import Outcome, run, run_ranks

BASELINE, DDP, FSDP = (f"solution.train_{name}" for name in ("baseline", "ddp", "fsdp"))
MODEL = ("--vocab-size", 64, "--sequence-length", 16, "--device", "cpu")
SMALL = (*MODEL, "--global-batch-size", 8, "--micro-batch-size", 2, "--steps", 3)
"""Flags of three steps, each of four micro-batches on one rank."""


def trained(data: Path, folder: Path, *flags: object, module: str = BASELINE) -> Outcome:
    """Return how a small run on one rank ended, which writes to `folder`."""
    return run(module, *SMALL, "--data", data, "--out", folder, *flags, folder=folder)


def trained_ranks(module: str, *flags: object, folder: Path, num_ranks: int = 2) -> list[Outcome]:
    """Run a command on all ranks, which must end well."""
    ended = run_ranks(module, *flags, num_ranks=num_ranks, folder=folder)
    assert [rank.status for rank in ended] == [0] * num_ranks, ended
    return ended


def num_steps(folder: Path, name: str) -> int:
    """Return how many steps are in the log."""
    log = folder / f"{name}.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def steps(folder: Path, name: str = "baseline") -> list[dict[str, Any]]:
    """Return the log, line by line."""
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def summary(folder: Path, name: str = "baseline.rank0") -> dict[str, Any]:
    """Return what a rank wrote at its end."""
    return json.loads((folder / f"{name}.json").read_text())


def weights(folder: Path, name: str, num_ranks: int = 2) -> list[str]:
    """Return each rank's fingerprint of the full weights."""
    return [summary(folder, f"{name}.rank{r}")["weights_sha256"] for r in range(num_ranks)]


def wait_for(is_so: Callable[[], object], *, timeout_s: float = 60.0) -> None:
    """Return as soon as `is_so()`; fail if it is never."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "no progress"
        time.sleep(0.002)
