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
is its own Python.

Bound: on one rank, in core time, NAME against bare at most 1.5, though the model is next to
nothing: a step of GPT-2 small takes hundreds of times as long.
"""

import contextlib
import itertools
import math
import os
import statistics
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from spec_tests.bench import paired, runner
from spec_tests.bench.paired import Found
from spec_tests.impls import parse
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.target import load

BARE, COUNTS, AGREEMENT, RECORD, AGAIN = PARTS = (
    *("bare", "+ counts", "+ agreement", "+ record"),
    "bare again",
)
BOUND = 1.5
VOCABULARY, WIDTH, MICRO_BATCH, LENGTH, NUM_MICRO = 64, 32, 2, 8, 2
STEPS_PER_BLOCK = 20
MAX_NORM, RATE = 1.0, 1e-3


# ------------------------------------------------------------------------------------ in the ranks


class Loop(paired.Arm):
    """A loop with the parts that its label names."""

    def __init__(self, ctx: Context, label: str) -> None:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY))
        self.num_ranks = ctx.world_size
        self.model: nn.Module = module
        if self.num_ranks > 1:
            self.model = nn.parallel.DistributedDataParallel(module)
        self.no_sync: Any = getattr(self.model, "no_sync", contextlib.nullcontext)
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=RATE)
        draw, shape = torch.Generator().manual_seed(ctx.rank), (8, 2, MICRO_BATCH, LENGTH)
        pairs = torch.randint(VOCABULARY, shape, generator=draw)
        self.batches = itertools.cycle([(inputs, targets) for inputs, targets in pairs])
        parts = PARTS.index(label) if label in (COUNTS, AGREEMENT, RECORD) else 0
        self.counts, self.agrees, self.keeps_records = (parts >= n for n in (1, 2, 3))
        self.agrees = self.agrees and self.num_ranks > 1
        self.records: list[dict[str, float]] = []

    def step(self) -> None:
        """Run one optimizer step."""
        batches = list(itertools.islice(self.batches, NUM_MICRO))
        count: float = NUM_MICRO * MICRO_BATCH * LENGTH * self.num_ranks
        if self.counts:
            here = sum(int((targets != -100).sum()) for _, targets in batches)
            count = here * self.num_ranks
        if self.agrees:
            count = self._sum(float(here), 0.0, 0.0)[0]
        loss_sum = torch.zeros((), dtype=torch.float64) if self.keeps_records else None
        for index, (inputs, targets) in enumerate(batches):
            with self.no_sync() if index < NUM_MICRO - 1 else contextlib.nullcontext():
                logits = self.model(inputs).flatten(0, 1)
                loss = F.cross_entropy(logits, targets.flatten(), reduction="sum")
                (loss * (self.num_ranks / count)).backward()
            if loss_sum is not None:
                loss_sum += loss.detach()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        total, num_bad = 0.0, 0.0
        if self.agrees:
            total, num_bad = self._sum(float(loss.detach()), float(not math.isfinite(norm)))
        if loss_sum is not None:
            total = total or float(loss_sum)
            if num_bad or not math.isfinite(total) or not math.isfinite(norm):
                raise FloatingPointError(f"expected finite numbers, got {total} and {norm}")
            for group in self.optimizer.param_groups:
                group["lr"] = rate(len(self.records))
            record = {"step": len(self.records), "loss": total / count, "grad_norm": float(norm)}
            self.records.append(record)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _sum(self, *numbers: float) -> list[float]:
        total = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()


class Trained(Loop):
    """The same model, in the hands of an implementation's `train`."""

    def __init__(self, ctx: Context, name: str) -> None:
        super().__init__(ctx, BARE)
        self.train = load(parse(name)).train

    def take(self, num_steps: int) -> None:
        """Run so many optimizer steps, in one call."""
        self.train(
            self.model,
            self.optimizer,
            self.batches,
            steps=num_steps,
            global_batch_size=NUM_MICRO * MICRO_BATCH * self.num_ranks,
            micro_batch_size=MICRO_BATCH,
            max_norm=MAX_NORM,
            lr=rate,
        )


def rate(finished: int) -> float:
    """A learning rate that is a function, and nothing else."""
    return RATE


# ----------------------------------------------------------------------------------- in the parent


class Trainer(runner.Comparison):
    """Loops with one thing more each, in time on the cores."""

    name = "trainer"
    title = "A trainer's step, paired against a bare loop of the same arithmetic"
    all_cases = [
        runner.Case(f"{n} rank(s)", "", n, STEPS_PER_BLOCK, 100, {BARE: BOUND}) for n in (1, 2)
    ]
    bases, again = (BARE,), AGAIN
    clock, max_others = "core_seconds", float("inf")
    kept = f"{{found.num_kept}} rounds of {STEPS_PER_BLOCK} steps."
    columns = {
        "us": lambda found, label: f"{1e3 * found.ms()[label]:.0f}",
        "core us": lambda found, label: (
            f"{1e3 * found.ms('core_seconds')[label] / found.case.num_ranks:.0f}"
        ),
        "adds, core us": lambda found, label: adds(found, label),
        "core against bare": runner.against(BARE),
    }

    @property
    def note(self) -> str:  # type: ignore[override]  # as busy as the machine is when it is over
        """How it was measured, and how busy the machine was."""
        return (
            f"{NUM_MICRO} micro-batches of {MICRO_BATCH} x {LENGTH} tokens per step and rank, "
            "AdamW, 1 thread; microseconds per step, `core` on the cores and per rank; what an arm "
            "adds is the paired median with its 95 % interval, to the arm above it; load average "
            f"meanwhile {os.getloadavg()[0]:.0f}, which core time feels least"
        )

    def arms(self, ctx: Context, case: Any, impls: list[str]) -> dict[str, paired.Arm]:
        """All train alike: equal weights but for rounding, or nothing here means anything."""
        parts = [p for p in PARTS[:-1] if p != AGREEMENT or ctx.world_size > 1]
        arms = {
            label: Trained(ctx, label) if label in impls else Loop(ctx, label)
            for label in (*parts, *impls, AGAIN)
        }
        for label, arm in arms.items():
            arm.take(STEPS_PER_BLOCK)
            weights, expected = (next(a.model.parameters()) for a in (arm, arms[BARE]))
            difference = float((weights - expected).detach().abs().max())
            # Twenty AdamW steps of 1e-3: another sum moves a weight by far more than this.
            if not difference <= 1e-5:
                raise ValueError(f"expected {label} to train as {BARE}, weights off {difference}")
        return dict(arms)

    def verdicts(self, found: Found) -> list[str]:
        """Of one rank only, where nothing but this process decides."""
        return super().verdicts(found) if found.case.num_ranks == 1 else []


def adds(found: Found, label: str) -> str:
    """Return what an arm costs beyond the one before it; an implementation has all to do."""
    if label == BARE:
        return ""
    before = found.labels[found.labels.index(label) - 1]
    before = BARE if label == AGAIN else RECORD if label in found.impls else before
    core = found.core_seconds
    scale = 1e6 / found.case.num_ranks
    differences = sorted(scale * (a - b) for a, b in zip(core[label], core[before], strict=True))
    low, high = paired.median_interval(differences)
    return f"{statistics.median(differences):.0f} [{low:.0f}, {high:.0f}]"


BENCHMARK = Trainer()
