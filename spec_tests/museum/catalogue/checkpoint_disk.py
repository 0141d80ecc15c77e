"""Near-misses of files: crashes, full disks, damage; and right ones."""

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from spec_tests.museum.card import Source, benign, near_miss
from spec_tests.plain.checkpoint import PlainCheckpoint, bare, rank, size

PLAIN = Source("spec_tests.plain.checkpoint")
SAVE = Source("solution.checkpoint.save")


@near_miss("checkpoint.in-place-parts", rejected_by="checkpoint.crash.same-step-again")
class InPlaceParts(PlainCheckpoint):
    """Replaces the files of a folder one by one.

    From: torch.distributed.checkpoint into a folder that exists: a silent mix
    Unseen: Each file is whole.
    """

    def put(self, root, step, state):
        folder = root / f"step-{step}"
        folder.mkdir(parents=True, exist_ok=True)
        for part, value in state.items():
            with (root / "part.tmp").open("wb") as file:
                torch.save(value, file)
            (root / "part.tmp").replace(folder / f"{part}.pt")

    def newest(self, root):
        complete = [path for path in root.glob("step-*") if (path / "ranks.pt").exists()]
        return max(complete, key=self.order, default=None)

    def read(self, path):
        return {each.stem: torch.load(each, weights_only=True) for each in path.iterdir()}


@near_miss("checkpoint.skips-what-is-missing", rejected_by="checkpoint.damage.never-in-part")
class SkipsWhatIsMissing(InPlaceParts):
    """Loads the files that can be read and warns about the others.

    From: `if os.path.exists(optimizer_path)` in many loaders
    Unseen: Nobody reads warnings of a restart at night.
    """

    def read(self, path):
        state = {}
        for each in path.iterdir():
            try:
                state[each.stem] = torch.load(each, weights_only=True)
            except (RuntimeError, EOFError, ValueError):
                print(f"warning: skipped {each}")
        return state

    def restore_optimizer(self, model, optimizer, saved):
        if saved:
            super().restore_optimizer(model, optimizer, saved)

    def load(self, directory, *, model, optimizer, loader=None):
        path = self.share(self.newest(self.root(directory)) if rank() == 0 else None)
        if path is None:
            return self.none(directory)
        state = {"model": bare(model).state_dict(), "optimizer": {}, **self.read(path)}
        self.restore_model(model, state["model"])
        self.restore_optimizer(model, optimizer, state["optimizer"])
        self.restore_rank(state["ranks"], loader)
        return state["step"]


PLAIN.near_miss(
    "checkpoint.swallows-errors",
    "checkpoint.failure.is-reported",
    '- raise RuntimeError(f"the first rank could not write the checkpoint: {error}")',
    '+ warnings.warn(f"no checkpoint this time: {error}")',
    "...",
    "  import random",
    "+ import warnings",
    does="Prints a warning when a save fails, and goes on.",
    seen="try/except around the save, so that training never stops for it",
    unseen="Until the day it is needed.",
)

PLAIN.near_miss(
    "checkpoint.fails-alone",
    "checkpoint.failure.on-all-ranks",
    "- error = self.share(error)",
    "+ pass",
    does="Raises on the rank that could not write, and nowhere else.",
    seen="torch issue 143536",
    unseen="One machine's disk is full; the others wait in the next step.",
)

PLAIN.near_miss(
    "checkpoint.stumbles-over-leftovers",
    ("checkpoint.failure.next-save-works", "checkpoint.crash.next-save-works"),
    "  temporary = self.temporary(root)",
    '+ temporary.touch(exist_ok=False)  # "another save is under way"',
    does="Refuses to save while a temporary file is there.",
    seen="speechturn issue 15; a lock that nobody removes",
    unseen="It takes a failed save first.",
)

PLAIN.near_miss(
    "checkpoint.newest-or-nothing",
    "checkpoint.damage.older-is-used",
    does="Gives up where the newest save is damaged.",
    seen="the newest by name, and no second try",
    unseen="It is an error, and somebody can delete the file; at night nobody does.",
)

PLAIN.near_miss(
    "checkpoint.trusts-the-disk",
    "checkpoint.damage.flipped-bit-is-noticed",
    does="Loads values in which a bit has been flipped.",
    seen="torch.load, which ignores the check sums of its own archive",
    unseen="Disks are right, nearly always.",
)

SAVE.near_miss(
    "checkpoint.captures-on-its-own",
    "checkpoint.failure.of-a-loader",
    '- tensors, common, own = together(f"capture its state at step {step}", capture, group)',
    "+ tensors, common, own = capture()",
    does="The ranks agree on whether the write succeeded, and not on the capture of the state.",
    seen="a try around the writing alone",
    unseen="Disks fail in tests, loaders do not.",
    outcomes=("hang",),
)

PLAIN.near_miss(
    "checkpoint.runs-pickles",
    "checkpoint.safety.runs-no-code",
    "- return torch.load(path, weights_only=True)",
    "+ return torch.load(path, weights_only=False)",
    does="Unpickles whatever the file holds.",
    seen="torch.load(weights_only=False); the metadata of torch.distributed.checkpoint",
    unseen="One's own files are harmless.",
)


@benign("benign.checkpoint-folder")
class FolderPerStep(PlainCheckpoint):
    """A folder of files per save and a pointer.

    A new folder for each save, renamed when it is whole; the pointer is moved after that.
    """

    def put(self, root, step, state):
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(root / "partial", ignore_errors=True)
        (root / "partial").mkdir()
        for part, value in state.items():
            torch.save(value, root / "partial" / f"{part}.pt")
        final = root / f"step-{step}-{time.time_ns()}"
        (root / "partial").rename(final)
        (root / "latest.tmp").write_text(final.name)
        (root / "latest.tmp").replace(root / "latest")

    def newest(self, root):
        pointer = root / "latest"
        return root / pointer.read_text() if pointer.exists() else None

    def read(self, path):
        parts = ("step", "model", "optimizer", "ranks")
        return {part: torch.load(path / f"{part}.pt", weights_only=True) for part in parts}


@benign("benign.checkpoint-marked")
class Marked(FolderPerStep):
    """Written in place by a thread, an empty marker at last.

    Writes in a thread, under the final name; an empty file says that all is there.
    """

    def put(self, root, step, state):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self.write, root / f"{step:08}-{time.time_ns()}", state).result()

    def write(self, folder, state):
        folder.mkdir(parents=True)
        for part, value in state.items():
            torch.save(value, folder / f"{part}.pt")
        (folder / "complete").touch()

    def newest(self, root):
        return max((marker.parent for marker in root.glob("*-*/complete")), default=None)


@benign("benign.checkpoint-zero")
class ZeroForNone(PlainCheckpoint):
    """Returns 0 where there is nothing."""

    def none(self, directory):
        return 0

    def put(self, root, step, state):
        super().put(root, step, state)
        descriptor = os.open(root, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def tell(self, error):
        super().tell(error)
        if size() > 1:
            dist.barrier()


PLAIN.benign("benign.checkpoint-file", does="One file per step, renamed when it is whole.")
