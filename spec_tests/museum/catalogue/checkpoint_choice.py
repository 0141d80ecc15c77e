"""Near-misses of loading: another save than the newest, or one that does not fit the model."""

from __future__ import annotations

from pathlib import Path

from spec_tests.museum.card import Patched, near_miss
from spec_tests.plain.checkpoint import PlainCheckpoint, values


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


@near_miss("checkpoint.takes-a-backup", rejected_by="checkpoint.choice.backups")
class TakesABackup(PlainCheckpoint):
    """Reads the number behind `step-` and not what follows it.

    From: re.match for re.fullmatch
    Unseen: Until somebody puts a save aside under its name and a word.
    """

    def newest(self, root):
        return max(root.glob("step-[0-9]*.pt"), key=self.order, default=None)

    def order(self, path):
        return int(path.stem.split("-")[1])


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


@near_miss("checkpoint.leaves-the-rest-in-the-file", rejected_by="checkpoint.mismatch.raises")
class LeavesTheRestInTheFile(PlainCheckpoint):
    """Loads into a model that lacks some of what was saved.

    From: `{name: saved[name] for name in module.state_dict()}`
    Unseen: The other way round, a name that is missing in the file, is a KeyError.
    """

    def check(self, module, saved):
        super().check(module, {name: saved[name] for name in values(module) if name in saved})


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
