"""Near-misses of files: crashes, full disks, the wrong one, what does not fit; and right ones."""

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

from spec_tests.impostors.card import Patched, benign, near_miss
from spec_tests.plain.checkpoint import PlainCheckpoint, bare, rank, size, values


@near_miss("checkpoint.points-by-path", rejected_by="checkpoint.place.any")
class PointsByPath(PlainCheckpoint):
    """Points to the newest by its absolute path.

    From: a `latest` file or link made with the path of the day
    Unseen: Until the run is moved to another disk.
    """

    def put(self, root, step, state):
        super().put(root, step, state)
        (root / "latest").write_text(str(root / f"step-{step}.pt"))

    def newest(self, root):
        pointer = root / "latest"
        return Path(pointer.read_text()) if pointer.exists() else None


@near_miss("checkpoint.newest-as-text", rejected_by="checkpoint.choice.highest-step")
class NewestAsText(PlainCheckpoint):
    """Sorts names: step-9 comes after step-100.

    From: max(glob(...)) in many training scripts
    Unseen: Until the step has one digit more.
    """

    def order(self, path):
        return path.name


@near_miss("checkpoint.newest-by-time", rejected_by="checkpoint.choice.highest-step")
class NewestByTime(PlainCheckpoint):
    """Takes the save that was written last.

    From: sorted(..., key=os.path.getmtime)
    Unseen: Later saves have higher steps, until a run is repeated from an earlier one.
    """

    def order(self, path):
        return path.stat().st_mtime_ns


@near_miss(
    "checkpoint.any-word-for-a-number",
    rejected_by="checkpoint.choice.names-alike",
    outcomes=("failed", "hang"),  # where the first rank alone looks, the others wait for it
)
class AnyWordForANumber(PlainCheckpoint):
    """Takes whatever stands behind `step-` for a number.

    From: `int(path.stem.split("-")[1])` over a glob
    Unseen: Nobody copies a good checkpoint to a name of their own, in a test.
    """

    def newest(self, root):
        return max(root.glob("step-*.pt"), key=self.order, default=None)


@near_miss("checkpoint.newest-entry", rejected_by="checkpoint.choice.foreign-files")
class NewestEntry(PlainCheckpoint):
    """Takes whatever was changed last.

    From: max(mtime) over the folder
    Unseen: Until somebody leaves a note.
    """

    def newest(self, root):
        entries = list(root.iterdir()) if root.exists() else []
        return max(entries, key=lambda path: path.stat().st_mtime_ns, default=None)


@near_miss("checkpoint.none-is-minus-one", rejected_by="checkpoint.choice.none")
class NoneIsMinusOne(PlainCheckpoint):
    """Returns -1 where there is nothing to load.

    From: a `last_step` that callers add one to
    Unseen: The first run counts from -1 and nobody looks.
    """

    def none(self, directory):
        return -1


@near_miss(
    "checkpoint.to-the-final-name",
    rejected_by=("checkpoint.crash.old-or-new", "checkpoint.crash.same-step-again"),
)
class ToTheFinalName(PlainCheckpoint):
    """Writes straight to the final name.

    From: the course's trainer, nanoGPT, picotron
    Unseen: It takes a kill in the wrong second.
    """

    def put(self, root, step, state):
        root.mkdir(parents=True, exist_ok=True)
        torch.save(state, root / f"step-{step}.pt")


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


@near_miss(
    "checkpoint.removes-older-first",
    rejected_by=("checkpoint.crash.old-or-new", "checkpoint.failure.keeps-older"),
)
class RemovesOlderFirst(PlainCheckpoint):
    """Makes room before it writes.

    From: retention in front of the save
    Unseen: There is always one checkpoint, except while it counts.
    """

    def put(self, root, step, state):
        for path in root.glob("step-*.pt") if root.exists() else ():
            path.unlink()
        super().put(root, step, state)


@near_miss("checkpoint.swallows-errors", rejected_by="checkpoint.failure.is-reported")
class SwallowsErrors(PlainCheckpoint):
    """Prints a warning when a save fails, and goes on.

    From: try/except around the save, so that training never stops for it
    Unseen: Until the day it is needed.
    """

    def tell(self, error):
        if error is not None:
            print(f"warning: no checkpoint this time: {error}")


@near_miss("checkpoint.fails-alone", rejected_by="checkpoint.failure.on-all-ranks")
class FailsAlone(PlainCheckpoint):
    """Raises on the rank that could not write, and nowhere else.

    From: torch issue 143536
    Unseen: One machine's disk is full; the others wait in the next step.
    """

    def tell(self, error):
        if error is not None:
            raise RuntimeError(error)


@near_miss(
    "checkpoint.stumbles-over-leftovers",
    rejected_by=("checkpoint.failure.next-save-works", "checkpoint.crash.next-save-works"),
)
class StumblesOverLeftovers(PlainCheckpoint):
    """Refuses to save while a temporary file is there.

    From: speechturn issue 15; a lock that nobody removes
    Unseen: It takes a failed save first.
    """

    def put(self, root, step, state):
        root.mkdir(parents=True, exist_ok=True)
        self.temporary(root).touch(exist_ok=False)  # "another save is under way"
        super().put(root, step, state)


@near_miss("checkpoint.newest-or-nothing", rejected_by="checkpoint.damage.older-is-used")
class NewestOrNothing(PlainCheckpoint):
    """Gives up where the newest save is damaged.

    From: the newest by name, and no second try
    Unseen: It is an error, and somebody can delete the file; at night nobody does.

    What cannot be read is an error, though an older save lies beside it.
    """


@near_miss("checkpoint.trusts-the-disk", rejected_by="checkpoint.damage.flipped-bit-is-noticed")
class TrustsTheDisk(PlainCheckpoint):
    """Loads values in which a bit has been flipped.

    From: torch.load, which ignores the check sums of its own archive
    Unseen: Disks are right, nearly always.

    What can be read is taken for what was written: torch.load looks at no check sum.
    """


@near_miss("checkpoint.leaves-the-rest-in-the-file", rejected_by="checkpoint.mismatch.raises")
class LeavesTheRestInTheFile(PlainCheckpoint):
    """Loads into a model that lacks some of what was saved.

    From: `{name: saved[name] for name in module.state_dict()}`
    Unseen: The other way round, a name that is missing in the file, is a KeyError.
    """

    def check(self, module, saved):
        super().check(module, {name: saved[name] for name in values(module) if name in saved})


@near_miss(
    "checkpoint.compares-on-its-own",
    rejected_by="checkpoint.mismatch.on-one-rank",
    outcomes=("hang",),
)
class ComparesOnItsOwn(Patched):
    """Finds out on each rank alone whether the model fits.

    From: `load_state_dict`, which asks nobody, between two collectives
    Unseen: All ranks build the same model.
    """

    module = "solution.checkpoint.load"
    find = """together(
            f"load {self.path}", self._compare, self.group
        )"""
    replace = "self._compare()"


@near_miss(
    "checkpoint.captures-on-its-own",
    rejected_by="checkpoint.failure.of-a-loader",
    outcomes=("hang",),
)
class CapturesOnItsOwn(Patched):
    """Agrees on what was written, and not on what was to be written.

    From: a try around the writing alone
    Unseen: Disks fail in tests, loaders do not.
    """

    module = "solution.checkpoint.save"
    find = 'together(f"capture its state at step {step}", capture, group)'
    replace = "capture()"


@near_miss("checkpoint.not-strict", rejected_by="checkpoint.mismatch.raises")
class NotStrict(PlainCheckpoint):
    """Loads what fits and keeps the rest as it was built.

    From: strict=False
    Unseen: The loss starts higher than it was.
    """

    def check(self, module, saved):
        pass

    def restore_model(self, model, saved):
        own = bare(model).state_dict()
        fitting = {n: t for n, t in saved.items() if n in own and own[n].shape == t.shape}
        bare(model).load_state_dict(fitting, strict=False)

    def restore_optimizer(self, model, optimizer, saved):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter, entry in zip(parameters, saved.values(), strict=False):
            optimizer.state[parameter] = dict(entry["state"])


@near_miss("checkpoint.copies-before-checking", rejected_by="checkpoint.mismatch.changes-nothing")
class CopiesBeforeChecking(PlainCheckpoint):
    """Copies values into the model and then finds that some do not fit.

    From: Module.load_state_dict raises after it has copied what fits
    Unseen: Who catches the error trains a mixture.
    """

    def check(self, module, saved):
        pass


@near_miss("checkpoint.says-not-what", rejected_by="checkpoint.mismatch.names-the-culprit")
class SaysNotWhat(PlainCheckpoint):
    """Says that something does not fit, not what.

    From: a blanket except around loading
    Unseen: It is an error, as it should be.
    """

    def check(self, module, saved):
        try:
            super().check(module, saved)
        except ValueError:
            raise ValueError("the checkpoint does not fit the model") from None


@near_miss("checkpoint.runs-pickles", rejected_by="checkpoint.safety.runs-no-code")
class RunsPickles(PlainCheckpoint):
    """Unpickles whatever the file holds.

    From: torch.load(weights_only=False); the metadata of torch.distributed.checkpoint
    Unseen: One's own files are harmless.
    """

    def read(self, path):
        return torch.load(path, weights_only=False)


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


@benign("benign.checkpoint-file")
class CheckpointFile(PlainCheckpoint):
    """One file per step, renamed when it is whole."""
