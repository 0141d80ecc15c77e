"""What a trainer adds to a bare loop that computes the same updates, in microseconds per step.

A model so small that everything around it shows: an embedding and a linear layer, two micro-batches
of 2 x 8 tokens per step, AdamW, clipping; on one rank, and on two under PyTorch's DDP. Arms, all in
the same ranks, each with a model of its own, each with one thing more than the arm before it:

    bare            forward, sum of losses / a count that is known, backward, clip, step, zero_grad;
                    all but the last micro-batch inside no_sync
    + counts        how many targets are not -100, on this rank
    + agreement     two ranks: a sum of three float64 before the backward (the count, who is out of
                    data, who failed) and one of two after it (the loss, who is not finite)
    + record        the loss in float64, the norm as a number, both finite, the learning rate set
                    from a function, a dict of all that
    NAME            train of each --impl, which is told nothing in advance
    bare again      the first once more: the A/A arm (see paired.py)

What stands in a row beyond the one before is the price of that thing: what a right answer costs
where padding, ranks that run dry and gradients that overflow are possible. What stands in NAME's
is its own Python. For the reference: gradients are dropped before and after a step, in the model
and in the optimizer, the size of each batch is checked, a few calls lie in between.

Bound: on one rank, in core time, NAME against bare at most 1.5, though the model is next to
nothing: a step of GPT-2 small takes hundreds of times as long. The exit status is 1 when it is
missed or the A/A arm voids the run.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from spec_tests.benchmarks import paired
from spec_tests.rig.rank import Context
from spec_tests.rig.world import Worlds
from spec_tests.target import load, parse

RESULTS = Path(__file__).with_name("results")
BARE, COUNTS, AGREEMENT, RECORD, AGAIN = PARTS = (
    *("bare", "+ counts", "+ agreement", "+ record"),
    "bare again",
)
BOUND = 1.5
VOCABULARY, WIDTH, MICRO_BATCH, LENGTH, NUM_MICRO = 64, 32, 2, 8, 2
STEPS_PER_BLOCK = 20
MAX_NORM, RATE = 1.0, 1e-3

Batch = tuple[torch.Tensor, torch.Tensor]


# ------------------------------------------------------------------------------------ in the ranks


class Loop:
    """A loop with the parts that its label names; `take` runs so many steps."""

    def __init__(self, ctx: Context, label: str) -> None:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY))
        self.num_ranks = ctx.world_size
        self.model: nn.Module = module
        if self.num_ranks > 1:
            self.model = nn.parallel.DistributedDataParallel(module)
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=RATE)
        self.batches = _batches(ctx.rank)
        parts = PARTS.index(label) if label in (COUNTS, AGREEMENT, RECORD) else 0
        self.counts, self.agrees, self.records = (parts >= n for n in (1, 2, 3))
        self.agrees = self.agrees and self.num_ranks > 1

    def take(self, steps: int) -> None:
        """So many optimizer steps."""
        for finished in range(steps):
            self._step(finished)

    def _step(self, finished: int) -> dict[str, float] | None:
        batches = list(itertools.islice(self.batches, NUM_MICRO))
        count: float = NUM_MICRO * MICRO_BATCH * LENGTH * self.num_ranks
        if self.counts:
            here = sum(int((targets != -100).sum()) for _, targets in batches)
            count = here * self.num_ranks
        if self.agrees:
            count = self._sum(float(here), 0.0, 0.0)[0]
        loss_sum = torch.zeros((), dtype=torch.float64) if self.records else None
        for index, (inputs, targets) in enumerate(batches):
            with self._no_sync() if index < NUM_MICRO - 1 else contextlib.nullcontext():
                logits = self.model(inputs).flatten(0, 1)
                loss = F.cross_entropy(logits, targets.flatten(), reduction="sum")
                (loss * (self.num_ranks / count)).backward()
            if loss_sum is not None:
                loss_sum += loss.detach()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        total, num_bad = 0.0, 0.0
        if self.agrees:
            total, num_bad = self._sum(float(loss.detach()), float(not math.isfinite(norm)))
        record = None
        if loss_sum is not None:
            total = total or float(loss_sum)
            if num_bad or not math.isfinite(total) or not math.isfinite(norm):
                raise FloatingPointError(f"expected finite numbers, got {total} and {norm}")
            for group in self.optimizer.param_groups:
                group["lr"] = rate(finished)
            record = {"step": finished, "loss": total / count, "grad_norm": float(norm)}
        self.optimizer.step()
        self.optimizer.zero_grad()
        return record

    def _no_sync(self) -> contextlib.AbstractContextManager[Any]:
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            return self.model.no_sync()
        return contextlib.nullcontext()

    def _sum(self, *numbers: float) -> list[float]:
        total = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()


class Trained(Loop):
    """The same model, in the hands of an implementation's `train`."""

    def __init__(self, ctx: Context, name: str) -> None:
        super().__init__(ctx, BARE)
        self.train = load(parse(name)).train

    def take(self, steps: int) -> None:
        """So many optimizer steps, in one call."""
        self.train(
            self.model,
            self.optimizer,
            self.batches,
            steps=steps,
            global_batch_size=NUM_MICRO * MICRO_BATCH * self.num_ranks,
            micro_batch_size=MICRO_BATCH,
            max_norm=MAX_NORM,
            lr=rate,
        )


def rate(finished: int) -> float:
    """A learning rate that is a function, and nothing else."""
    return RATE


def _batches(seed: int) -> Iterator[Batch]:
    draw = torch.Generator().manual_seed(seed)
    shape = (MICRO_BATCH, LENGTH)
    pairs = [
        tuple(torch.randint(VOCABULARY, shape, generator=draw) for _ in range(2)) for _ in range(8)
    ]
    return itertools.cycle(pairs)  # type: ignore[arg-type]  # each has two


def arm_labels(impls: list[str], num_ranks: int) -> list[str]:
    """Names of the arms, in the order of an even round."""
    parts = [p for p in PARTS[:-1] if p != AGREEMENT or num_ranks > 1]
    return [*parts, *impls, AGAIN]


def body(ctx: Context, impls: list[str], num_rounds: int) -> dict[str, Any]:
    """Rank body: all arms, all rounds; this rank's seconds, and the weights of each arm."""
    labels = arm_labels(impls, ctx.world_size)
    loops = [Trained(ctx, name) if name in impls else Loop(ctx, name) for name in labels]
    for loop in loops:
        loop.take(STEPS_PER_BLOCK)
    weights = [next(loop.model.parameters()).detach().clone() for loop in loops]
    rounds = [_round(ctx, loops, index) for index in range(num_rounds)]
    return {"weights": weights, "rounds": rounds}


def _round(ctx: Context, loops: list[Loop], index: int) -> dict[str, list[float]]:
    seconds, core_seconds = [0.0] * len(loops), [0.0] * len(loops)
    for number in paired.order(len(loops), index):
        ctx.barrier()
        start, core_start = time.perf_counter(), time.process_time()
        loops[number].take(STEPS_PER_BLOCK)
        seconds[number] = (time.perf_counter() - start) / STEPS_PER_BLOCK
        core_seconds[number] = (time.process_time() - core_start) / STEPS_PER_BLOCK
    return {"seconds": seconds, "core_seconds": core_seconds}


# ----------------------------------------------------------------------------------- in the parent


def summarise(impls: list[str], ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians, what each arm adds to the one before it, and the verdicts."""
    labels = arm_labels(impls, len(ranks))
    _check_weights(labels, ranks)
    times = {
        kind: {label: _of_ranks(ranks, kind, number) for number, label in enumerate(labels)}
        for kind in ("seconds", "core_seconds")
    }
    core = times["core_seconds"]
    added = {}
    for label in labels[1:]:
        # What stands before an implementation is all that it has to do.
        before = BARE if label == AGAIN else RECORD if label in impls else _before(labels, label)
        differences = [1e6 * (a - b) for a, b in zip(core[label], core[before], strict=True)]
        low, high = paired.median_interval(sorted(differences))
        added[label] = [statistics.median(differences), low, high]
    return {
        "num_rounds": len(core[BARE]),
        "us": {
            kind: {label: 1e6 * statistics.median(v) for label, v in of.items()}
            for kind, of in times.items()
        },
        "added_core_us": added,
        "against_bare": {
            label: paired.ratio(core[label], core[BARE]) for label in labels if label != BARE
        },
    }


def _before(labels: list[str], label: str) -> str:
    return labels[labels.index(label) - 1]


def _of_ranks(ranks: list[dict[str, Any]], kind: str, number: int) -> list[float]:
    """Per round: the slowest rank's seconds, or the core seconds of the mean rank."""
    combine: Callable[[list[float]], float] = max if kind == "seconds" else statistics.fmean
    return [
        combine([rank["rounds"][index][kind][number] for rank in ranks])
        for index in range(len(ranks[0]["rounds"]))
    ]


def _check_weights(labels: list[str], ranks: list[dict[str, Any]]) -> None:
    """The same arithmetic: equal weights but for rounding, or nothing here means anything."""
    for rank in ranks:
        for label, weights in zip(labels, rank["weights"], strict=True):
            difference = float((weights - rank["weights"][0]).abs().max())
            # Twenty AdamW steps of 1e-3: another sum moves a weight by far more than this.
            if not difference <= 1e-5:
                raise SystemExit(f"expected {label} to train as {BARE}, weights off {difference}")


def verdicts(result: dict[str, Any], impls: list[str]) -> list[str]:
    """Of one rank, where nothing but this process decides."""
    again = result["against_bare"][AGAIN]
    if paired.is_void(again):
        low, high = paired.AA_RANGE
        return [f"void: bare against itself {again}, expected within {low}-{high}"]
    said = []
    for name in impls:
        high = result["against_bare"][name].high
        word = "holds" if high <= BOUND else "missed"
        said.append(f"{word}: {name} against {BARE} at most {high:.3f}, bound {BOUND}")
    return said


def render(results: dict[int, dict[str, Any]], environment: dict[str, str]) -> str:
    """The results as Markdown."""
    lines = ["# A trainer's step, paired against a bare loop of the same arithmetic", ""]
    lines += [f"- {key}: {value}" for key, value in environment.items()]
    lines.append(
        f"- {NUM_MICRO} micro-batches of {MICRO_BATCH} x {LENGTH} tokens per step and rank, AdamW, "
        "1 thread; microseconds per step, `core` on the cores and per rank; what an arm adds is "
        "the paired median with its 95 % interval, to the arm above it; load average meanwhile "
        f"{os.getloadavg()[0]:.0f}, which core time feels least"
    )
    for num_ranks, result in results.items():
        rows = [("arm", "us", "core us", "adds, core us", "core against bare")]
        for label, us in result["us"]["core_seconds"].items():
            added = result["added_core_us"].get(label)
            says = "" if added is None else "{:.0f} [{:.0f}, {:.0f}]".format(*added)
            wall, ratio = result["us"]["seconds"][label], result["against_bare"].get(label, "1")
            rows.append((label, f"{wall:.0f}", f"{us:.0f}", says, str(ratio)))
        lines += ["", f"## {num_ranks} rank(s)", "", paired.table(rows), ""]
        lines.append(f"{result['num_rounds']} rounds of {STEPS_PER_BLOCK} steps.")
        lines += ["", *[f"- {verdict}" for verdict in result.get("verdicts", [])]]
    return "\n".join(lines).rstrip() + "\n"


def main(argv: list[str]) -> int:
    """Measure, print, and write `trainer.md` and `trainer.json`."""
    parser = argparse.ArgumentParser(prog="python -m spec_tests.benchmarks trainer")
    parser.add_argument("--impl", action="append", help="as for the suite; default: solution")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(argv)
    impls = options.impl or ["solution"]
    worlds, results = Worlds(), {}
    try:
        for num_ranks in (1, 2):
            ranks = worlds.world(num_ranks).run(
                body, impls, options.rounds, timeout_s=3600.0, grace_s=60.0
            )
            results[num_ranks] = summarise(impls, list(ranks))
    finally:
        worlds.close()
    results[1]["verdicts"] = said = verdicts(results[1], impls)
    environment = paired.environment()
    text = render(results, environment)
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "trainer.md").write_text(text)
    record = {"environment": environment, "results": results}
    (options.out / "trainer.json").write_text(json.dumps(record, indent=1, default=vars) + "\n")
    return int(any(not verdict.startswith("holds") for verdict in said))
