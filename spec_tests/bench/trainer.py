"""What a trainer adds to a bare loop that computes the same updates, in microseconds per step.

A model so small that everything around it shows: an embedding and a linear layer, two micro-batches
of 2 x 8 tokens per step, AdamW, clipping; on one rank, and on two under PyTorch's DDP. Arms, all in
the same ranks, each with a model of its own:

    bare            forward, sum of losses / a count that is known, backward, clip, step, zero_grad;
                    all but the last micro-batch inside no_sync
    NAME            train of each --impl, which is told nothing in advance: it counts targets,
                    agrees with the other ranks, and keeps records
    bare again      the first once more: the A/A arm (see paired.py)

Bound: on one rank, in core time, NAME against bare at most 1.5, though the model is next to
nothing: a step of GPT-2 small takes hundreds of times as long.
"""

import contextlib
import itertools
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from spec_tests.bench import paired, runner
from spec_tests.bench.paired import Found
from spec_tests.impls import parse
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.target import load

BARE, AGAIN = "bare", "bare again"
BOUND = 1.5
VOCABULARY, WIDTH, MICRO_BATCH, LENGTH, NUM_MICRO = 64, 32, 2, 8, 2
STEPS_PER_BLOCK = 20
MAX_NORM, RATE = 1.0, 1e-3


# ------------------------------------------------------------------------------------ in the ranks


class Loop(paired.Arm):
    """The bare loop, and what an implementation's `train` is given."""

    def __init__(self, ctx: Context) -> None:
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

    def step(self) -> None:
        """Run one optimizer step."""
        for index, (inputs, targets) in enumerate(itertools.islice(self.batches, NUM_MICRO)):
            with self.no_sync() if index < NUM_MICRO - 1 else contextlib.nullcontext():
                logits = self.model(inputs).flatten(0, 1)
                loss = F.cross_entropy(logits, targets.flatten(), reduction="sum")
                (loss / (NUM_MICRO * MICRO_BATCH * LENGTH)).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Trained(Loop):
    """The same model, in the hands of an implementation's `train`."""

    def __init__(self, ctx: Context, name: str) -> None:
        super().__init__(ctx)
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
    """The bare loop and each `train`, in time on the cores."""

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
        "core against bare": runner.against(BARE),
    }

    @property
    def note(self) -> str:  # type: ignore[override]  # as busy as the machine is when it is over
        """How it was measured, and how busy the machine was."""
        return (
            f"{NUM_MICRO} micro-batches of {MICRO_BATCH} x {LENGTH} tokens per step and rank, "
            "AdamW, 1 thread; microseconds per step, `core` on the cores and per rank; load "
            f"average meanwhile {os.getloadavg()[0]:.0f}, which core time feels least"
        )

    def arms(self, ctx: Context, case: Any, impls: list[str]) -> dict[str, paired.Arm]:
        """All train alike: equal weights but for rounding, or nothing here means anything."""
        arms: dict[str, Loop] = {BARE: Loop(ctx)}
        arms |= {name: Trained(ctx, name) for name in impls}
        arms[AGAIN] = Loop(ctx)
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


BENCHMARK = Trainer()
