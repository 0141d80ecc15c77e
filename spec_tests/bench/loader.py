"""Tokens per second of a loader, and what it keeps in memory.

One rank reads a shard of 200 million random tokens, which lies in the page cache, in batches of
int64 inputs and targets that own their memory. Arms, all in one process:

    mapped          the shard as a memory map that is held, a slice of it cast twice per batch: the
                    way of modded-nanogpt
    NAME            token_loader of each --impl
    torchdata       StatefulDataLoader over a map-style dataset of the same sequences, cut from the
                    same map, collated into batches in the same process; where it is installed
    mapped again    the first once more: the A/A arm (see paired.py)

Time on the cores, which other programs disturb least: every round reads as many tokens with each
arm, going on where the last one ended; first touches of a page are part of reading it.
Memory: the largest resident size of the process during a full pass, less the one before it. Pages
of a map that were touched are resident, so whoever holds one grows by the file.

Bounds: NAME against mapped 1, against torchdata a fifth; memory 5 MB.
"""

import argparse
import functools
import gc
import importlib.util
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spec_tests.bench import machine, paired, runner
from spec_tests.bench.paired import Found
from spec_tests.bench.runner import Section, bullets, verdict
from spec_tests.impls import parse
from spec_tests.rig import shards
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.world import Worlds
from spec_tests.rig.target import load

MAPPED, TORCHDATA, AGAIN = "mapped", "torchdata", "mapped again"
LIMITS = {MAPPED: 1.0, TORCHDATA: 0.2}
MOST_GROWTH_BYTES = 5_000_000
TOKENS_PER_ROUND = 2**24

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case(runner.Case):
    """A shard and how it is cut; a step is a batch."""

    path: Path = Path()
    batch_size: int = 32
    length: int = 1024


class Sequences:
    """A map-style dataset: sequence k of a shard, inputs and targets, int64 `[length]`."""

    def __init__(self, path: Path, length: int) -> None:
        self.tokens, self.length = _map(path), length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> Batch:
        start = index * self.length
        return _pair(self.tokens[start : start + self.length + 1], (self.length,))


def _map(path: Path) -> np.memmap[Any, Any]:
    return np.memmap(path, dtype="<u2", mode="r", offset=1024)


def _pair(tokens: Any, shape: tuple[int, ...]) -> Batch:
    inputs, targets = tokens[:-1].astype(np.int64), tokens[1:].astype(np.int64)
    return torch.from_numpy(inputs).view(shape), torch.from_numpy(targets).view(shape)


def mapped_pass(case: Case) -> Iterator[Batch]:
    """Yield the batches of a shard that is mapped for as long as a pass takes."""
    tokens, size = _map(case.path), case.batch_size * case.length
    for start in range(0, len(tokens) - size, size):
        yield _pair(tokens[start : start + size + 1], (case.batch_size, case.length))


# ------------------------------------------------------------------------------------- in the rank


class Arm(paired.Arm):
    """Passes over the shard, one after another; `begin` returns the batches of one."""

    def __init__(self, begin: Callable[[], Iterable[Batch]], *, counts_memory: bool) -> None:
        self.begin = begin
        self.first = next(iter(begin()))  # this is also the warm-up
        self.facts["growth"] = self._growth() if counts_memory else None
        self.batches = (batch for _ in itertools.count() for batch in begin())

    def step(self) -> None:
        """What is timed: one batch."""
        next(self.batches)

    def _growth(self) -> int | None:
        """Return the bytes by which this process grew at the most during a pass, if known."""
        gc.collect()
        before = machine.resident_bytes()
        pass_ = itertools.islice(self.begin(), 0, None, 64)
        most = max((machine.resident_bytes() or 0 for _ in pass_), default=0)
        return None if before is None else max(before, most) - before


# ----------------------------------------------------------------------------------- in the parent


class Loader(runner.Comparison):
    """Loaders of one shard, in time on the core."""

    name = "loader"
    title = "Reading tokens, paired against a memory map and torchdata"
    bases: Sequence[str] = (MAPPED,)
    again = AGAIN
    clock, max_others = "core_seconds", float("inf")
    options = {
        "--tokens": {"type": int, "default": 200_000_000, "help": "in the shard"},
        "--batch-size": {"type": int, "default": 32},
        "--sequence-length": {"type": int, "default": 1024},
        "--folder": {"help": "for the shard; default: the system's temporary folder"},
    }
    kept = (
        "Seconds on the core; MB: growth of resident memory over one pass. {found.num_kept} rounds."
    )

    def arms(self, ctx: Context, case: Any, impls: list[str]) -> dict[str, paired.Arm]:
        """All begin with the same batch."""
        arms = {MAPPED: Arm(functools.partial(mapped_pass, case), counts_memory=True)}
        for name in impls:
            new_loader = functools.partial(
                load(parse(name)).token_loader,
                [case.path],
                batch_size=case.batch_size,
                sequence_length=case.length,
                rank=0,
                world_size=1,
            )
            arms[name] = Arm(new_loader, counts_memory=True)
        if importlib.util.find_spec("torchdata") is not None:
            package = importlib.import_module("torchdata.stateful_dataloader")
            # Only whole batches, as everywhere here.
            loader = package.StatefulDataLoader(
                Sequences(case.path, case.length),
                batch_size=case.batch_size,
                num_workers=0,
                drop_last=True,
            )
            arms[TORCHDATA] = Arm(lambda: loader, counts_memory=False)
        arms[AGAIN] = Arm(arms[MAPPED].begin, counts_memory=False)
        for label, arm in arms.items():
            if not all(map(torch.equal, arm.first, arms[MAPPED].first)):
                raise ValueError(f"expected equal first batches, {label} has {arm.first}")
        return dict(arms)

    def sections(self, options: argparse.Namespace, worlds: Worlds) -> Iterator[Section]:
        """One table of passes."""
        size = options.batch_size, options.sequence_length
        self.note = (
            f"one process, 1 thread, {options.tokens:,} tokens in batches of {size[0]} x "
            f"{size[1]}; ratios of times are paired medians with their 95 % interval"
        )
        steps = max(1, TOKENS_PER_ROUND // (size[0] * size[1]))
        with tempfile.TemporaryDirectory(prefix="trainspec-", dir=options.folder) as folder:
            case = Case("", "", 1, steps, 60, LIMITS, Path(folder) / "x_train_000000.bin", *size)
            draw = np.random.default_rng(0)
            with case.path.open("wb") as file:
                file.write(shards.shard_bytes([], count=options.tokens))
                draw.integers(0, 50257, options.tokens, dtype=np.uint16).tofile(file)
            found = self.compare(worlds, case, options)
        self.bases = [base for base in LIMITS if base in found.labels]
        self.columns = {
            "M tokens/core s": _rate,
            **{f"time against {base}": runner.against(base) for base in self.bases},
            "MB": _growth,
        }
        verdicts = self.verdicts(found)
        passes = [self.table(found), self.kept.format(found=found)]
        yield Section("", passes, self.record(found, verdicts))
        if TORCHDATA not in found.labels:
            missing = "torchdata is not installed and was not measured (pip install torchdata)"
            sys.stderr.write(missing + "\n")
            verdicts = [*verdicts, missing]
        yield Section("", [bullets(verdicts)])

    def bounds(self, found: Found, name: str) -> Iterator[str]:
        """Yield time and memory."""
        yield from super().bounds(found, name)
        growth = found.facts[name][0]["growth"]
        if growth is not None:
            words = f"{name} grew by {growth:,} bytes, bound {MOST_GROWTH_BYTES:,}"
            yield verdict(growth <= MOST_GROWTH_BYTES, words)


def _rate(found: Found, label: str) -> str:
    tokens = found.case.batch_size * found.case.length
    return f"{tokens / found.ms('core_seconds')[label] / 1e3:.0f}"


def _growth(found: Found, label: str) -> str:
    growth = found.facts[label][0]["growth"]
    return "" if growth is None else f"{growth / 1e6:.1f}"


BENCHMARK = Loader()
