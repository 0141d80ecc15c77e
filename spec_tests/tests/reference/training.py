"""Runs of the reference's training commands, small enough for a test: data, and what they leave."""

import json
import random
from pathlib import Path
from typing import Any

from spec_tests.rig.shards import shard_bytes
from spec_tests.tests.reference.launch import Outcome, Started, run

BASELINE, DDP, FSDP = (f"solution.train_{name}" for name in ("baseline", "ddp", "fsdp"))
MODEL = ("--vocab-size", 64, "--sequence-length", 16, "--device", "cpu")
SMALL = (*MODEL, "--global-batch-size", 8, "--micro-batch-size", 2, "--steps", 3)
"""Flags of three steps, each of four micro-batches on one rank."""


def shard(num_tokens: int, *, seed: int, vocabulary: int = 50257) -> bytes:
    """Return a shard of random tokens, written without the code that reads it."""
    draw = random.Random(seed)
    return shard_bytes(draw.randrange(vocabulary) for _ in range(num_tokens))


def write_shards(folder: Path, num_tokens: int) -> None:
    """Write two training shards of 64 words."""
    folder.mkdir(exist_ok=True)
    for index in range(2):
        data = shard(num_tokens, seed=index, vocabulary=64)
        (folder / f"x_train_{index:06d}.bin").write_bytes(data)


def trained(
    data: Path, folder: Path, *flags: object, module: str = BASELINE, **expected: Any
) -> Outcome:
    """Return how a small run on one rank ended, which writes to `folder`."""
    return run(module, *SMALL, "--data", data, "--out", folder, *flags, folder=folder, **expected)


def num_steps(folder: Path, name: str) -> int:
    """Return how many steps are in the log."""
    log = folder / f"{name}.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def after_steps(started: Started, folder: Path, number: int, name: str = "baseline") -> None:
    """Return when so many steps are in the log."""
    started.wait_until(lambda: num_steps(folder, name) >= number, f"{number} steps")


def steps(folder: Path, name: str = "baseline") -> list[dict[str, Any]]:
    """Return the log, line by line."""
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def summary(folder: Path, name: str = "baseline.rank0") -> dict[str, Any]:
    """Return what a rank wrote at its end."""
    return json.loads((folder / f"{name}.json").read_text())


def weights(folder: Path, name: str, num_ranks: int = 2) -> list[str]:
    """Return each rank's fingerprint of the full weights."""
    return [summary(folder, f"{name}.rank{r}")["weights_sha256"] for r in range(num_ranks)]
