"""Time to save a checkpoint, beside a bare torch.distributed.checkpoint save of the same tensors.

Two ranks hold the same model after two AdamW steps: weights and two moments per parameter, fp32.
Arms, all in the same ranks, each save into a fresh folder that is removed outside of the clock:

    bare           dcp.save of model and optimizer tensors, nested by name, with its defaults
    bare again     once more: the A/A arm (see paired.py)
    NAME           save_checkpoint of each --impl: generators, loader, markers, renames besides
    NAME load      load_checkpoint of what it saved

Writing is flushed to disk in all arms, so the disk decides: `--folder /dev/shm` leaves it out and
shows the code. Bound: a save at most 1.25 times a bare one, as it does what a bare one does and
then reads back which files there are, writes two small ones and flushes two folders.
"""

import argparse
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import checkpoint as dcp

from spec_tests.bench import paired, runner
from spec_tests.bench.runner import against, milliseconds
from spec_tests.impls import parse
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.world import Worlds
from spec_tests.rig.target import load

BASE, AGAIN = "bare", "bare again"
BOUND = 1.25


@dataclass(frozen=True)
class Case(runner.Case):
    """Eight layers of so many features, saved below a folder."""

    width: int = 1024
    folder: str = ""


class Arm(paired.Arm):
    """A way to save or load."""

    def __init__(self, ctx: Context, case: Case, act: Callable[[str], object]) -> None:
        self.ctx, self.place, self.act = ctx, f"{case.folder}/saved", act
        self.step()
        self.settle()

    def step(self) -> None:
        """What is timed."""
        self.act(self.place)

    def settle(self) -> None:
        """Remove what was written."""
        self.ctx.barrier()
        if self.ctx.rank == 0:
            shutil.rmtree(self.place, ignore_errors=True)
        self.ctx.barrier()


class Checkpoint(runner.Comparison):
    """Saving and loading."""

    name = "checkpoint"
    title = "Saving a checkpoint, paired against a bare torch.distributed.checkpoint save"
    bases, again = (BASE,), AGAIN
    columns = {"ms": milliseconds(".1f"), "against bare": against(BASE)}
    kept = "{found.num_kept} rounds kept."
    options = {
        "--width": {"type": int, "default": 1024, "help": "of 8 layers; default 1024, 96 MiB"},
        "--folder": {"help": "where to save; default: the system's temporary folder"},
    }

    def sections(self, options: argparse.Namespace, worlds: Worlds) -> Iterator[runner.Section]:
        """One table; the note says how much was saved, and where."""
        with tempfile.TemporaryDirectory(prefix="trainspec-", dir=options.folder) as folder:
            case = Case("", "", 2, 1, 24, {BASE: BOUND}, options.width, folder)
            found = self.compare(worlds, case, options)
        self.note = (
            f"2 ranks on gloo, 1 thread each, {found.most(BASE, 'bytes') / 2**20:.0f} MiB of "
            f"weights and moments, below {options.folder or tempfile.gettempdir()}; ratios are "
            "paired medians with their 95 % interval"
        )
        yield self.section(found)

    def arms(self, ctx: Context, case: Any, impls: list[str]) -> dict[str, paired.Arm]:
        """All save or load one model with its optimizer."""
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(case.width, case.width) for _ in range(8)])
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.ones(1, case.width)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        moments = {name: dict(optimizer.state[p]) for name, p in model.named_parameters()}
        bare = {"model": model.state_dict(), "optimizer": {"state": moments}}
        parts = {"model": model, "optimizer": optimizer}

        def save_bare(place: str) -> None:
            dcp.save(bare, checkpoint_id=place)

        arms = {BASE: Arm(ctx, case, save_bare)}
        for name in impls:
            arms |= of_implementation(ctx, case, name, parts)
        arms[AGAIN] = Arm(ctx, case, save_bare)
        tensors = [*model.parameters(), *(t for s in moments.values() for t in s.values())]
        arms[BASE].facts["bytes"] = sum(t.nbytes for t in tensors)
        return dict(arms)


def of_implementation(ctx: Context, case: Case, name: str, parts: dict[str, Any]) -> dict[str, Arm]:
    """Return the arms of one implementation."""
    impl = load(parse(name))
    kept = f"{case.folder}/{name}-kept"
    impl.save_checkpoint(kept, step=1, **parts)
    return {
        name: Arm(ctx, case, lambda place: impl.save_checkpoint(place, step=1, **parts)),
        f"{name} load": Arm(ctx, case, lambda place: impl.load_checkpoint(kept, **parts)),
    }


BENCHMARK = Checkpoint()
