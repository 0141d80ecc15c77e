"""Near-misses of saving and loading: crashes, full disks, the wrong one, what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from spec_tests.impostors.plain_checkpoint import PlainCheckpoint, bare, card, rank


class PointsByPath(PlainCheckpoint):
    def put(self, root: Path, step: int, state: dict[str, Any]) -> None:
        super().put(root, step, state)
        (root / "latest").write_text(str(root / f"step-{step}.pt"))

    def newest(self, root: Path) -> Path | None:
        pointer = root / "latest"
        return Path(pointer.read_text()) if pointer.exists() else None


class NewestAsText(PlainCheckpoint):
    def order(self, path: Path) -> Any:
        return path.name


class NewestEntry(PlainCheckpoint):
    def newest(self, root: Path) -> Path | None:
        entries = list(root.iterdir()) if root.exists() else []
        return max(entries, key=lambda path: path.stat().st_mtime_ns, default=None)


class NoneIsMinusOne(PlainCheckpoint):
    def none(self, directory: Any) -> int:
        return -1


class ToTheFinalName(PlainCheckpoint):
    def put(self, root: Path, step: int, state: dict[str, Any]) -> None:
        root.mkdir(parents=True, exist_ok=True)
        torch.save(state, root / f"step-{step}.pt")


class InPlaceParts(PlainCheckpoint):
    """A folder of files per step, each replaced atomically, the whole not."""

    def put(self, root: Path, step: int, state: dict[str, Any]) -> None:
        folder = root / f"step-{step}"
        folder.mkdir(parents=True, exist_ok=True)
        for part, value in state.items():
            with (root / "part.tmp").open("wb") as file:
                torch.save(value, file)
            (root / "part.tmp").replace(folder / f"{part}.pt")

    def newest(self, root: Path) -> Path | None:
        complete = [path for path in root.glob("step-*") if (path / "ranks.pt").exists()]
        return max(complete, key=self.order, default=None)

    def read(self, path: Path) -> dict[str, Any]:
        return {each.stem: torch.load(each, weights_only=True) for each in path.iterdir()}


class SkipsWhatIsMissing(InPlaceParts):
    def read(self, path: Path) -> dict[str, Any]:
        state = {}
        for each in path.iterdir():
            try:
                state[each.stem] = torch.load(each, weights_only=True)
            except (RuntimeError, EOFError, ValueError):
                print(f"warning: skipped {each}")
        return state

    def restore_optimizer(self, model: nn.Module, optimizer: Any, saved: dict[str, Any]) -> None:
        if saved:
            super().restore_optimizer(model, optimizer, saved)

    def load(self, directory, *, model, optimizer, loader=None) -> int:
        path = self.share(self.newest(self.root(directory)) if rank() == 0 else None)
        if path is None:
            return self.none(directory)
        state = {"model": bare(model).state_dict(), "optimizer": {}, **self.read(path)}
        self.restore_model(model, state["model"])
        self.restore_optimizer(model, optimizer, state["optimizer"])
        self.restore_rank(state["ranks"], loader)
        return state["step"]


class RemovesOlderFirst(PlainCheckpoint):
    def put(self, root: Path, step: int, state: dict[str, Any]) -> None:
        for path in root.glob("step-*.pt") if root.exists() else ():
            path.unlink()
        super().put(root, step, state)


class SwallowsErrors(PlainCheckpoint):
    def tell(self, error: str | None) -> None:
        if error is not None:
            print(f"warning: no checkpoint this time: {error}")


class FailsAlone(PlainCheckpoint):
    def tell(self, error: str | None) -> None:
        if error is not None:
            raise RuntimeError(error)


class StumblesOverLeftovers(PlainCheckpoint):
    def put(self, root: Path, step: int, state: dict[str, Any]) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.temporary(root).touch(exist_ok=False)  # "another save is under way"
        super().put(root, step, state)


class NewestOrNothing(PlainCheckpoint):
    """What cannot be read is an error, though an older save lies beside it."""


class TrustsTheDisk(PlainCheckpoint):
    """What can be read is taken for what was written: torch.load looks at no check sum."""


class NotStrict(PlainCheckpoint):
    def check(self, module: nn.Module, saved: dict[str, torch.Tensor]) -> None:
        pass

    def restore_model(self, model: nn.Module, saved: dict[str, torch.Tensor]) -> None:
        own = bare(model).state_dict()
        fitting = {n: t for n, t in saved.items() if n in own and own[n].shape == t.shape}
        bare(model).load_state_dict(fitting, strict=False)

    def restore_optimizer(self, model: nn.Module, optimizer: Any, saved: dict[str, Any]) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter, entry in zip(parameters, saved.values(), strict=False):
            optimizer.state[parameter] = dict(entry["state"])


class CopiesBeforeChecking(PlainCheckpoint):
    def check(self, module: nn.Module, saved: dict[str, torch.Tensor]) -> None:
        pass


class SaysNotWhat(PlainCheckpoint):
    def check(self, module: nn.Module, saved: dict[str, torch.Tensor]) -> None:
        try:
            super().check(module, saved)
        except ValueError:
            raise ValueError("the checkpoint does not fit the model") from None


class RunsPickles(PlainCheckpoint):
    def read(self, path: Path) -> dict[str, Any]:
        return torch.load(path, weights_only=False)


IMPOSTORS = (
    card(
        PointsByPath,
        "points-by-path",
        "Points to the newest by its absolute path.",
        "a `latest` file or link made with the path of the day",
        "Until the run is moved to another disk.",
        "place.any",
    ),
    card(
        NewestAsText,
        "newest-as-text",
        "Sorts names: step-9 comes after step-100.",
        "max(glob(...)) in many training scripts",
        "Until the step has one digit more.",
        "choice.highest-step",
    ),
    card(
        NewestEntry,
        "newest-entry",
        "Takes whatever was changed last.",
        "max(mtime) over the folder",
        "Until somebody leaves a note.",
        "choice.foreign-files",
    ),
    card(
        NoneIsMinusOne,
        "none-is-minus-one",
        "Returns -1 where there is nothing to load.",
        "a `last_step` that callers add one to",
        "The first run counts from -1 and nobody looks.",
        "choice.none",
    ),
    card(
        ToTheFinalName,
        "to-the-final-name",
        "Writes straight to the final name.",
        "the course's trainer, nanoGPT, picotron",
        "It takes a kill in the wrong second.",
        "crash.old-or-new",
        "crash.same-step-again",
    ),
    card(
        InPlaceParts,
        "in-place-parts",
        "Replaces the files of a folder one by one.",
        "torch.distributed.checkpoint into a folder that exists: a silent mix",
        "Each file is whole.",
        "crash.same-step-again",
    ),
    card(
        SkipsWhatIsMissing,
        "skips-what-is-missing",
        "Loads the files that can be read and warns about the others.",
        "`if os.path.exists(optimizer_path)` in many loaders",
        "Nobody reads warnings of a restart at night.",
        "damage.never-in-part",
    ),
    card(
        RemovesOlderFirst,
        "removes-older-first",
        "Makes room before it writes.",
        "retention in front of the save",
        "There is always one checkpoint, except while it counts.",
        "crash.old-or-new",
        "failure.keeps-older",
    ),
    card(
        SwallowsErrors,
        "swallows-errors",
        "Prints a warning when a save fails, and goes on.",
        "try/except around the save, so that training never stops for it",
        "Until the day it is needed.",
        "failure.is-reported",
    ),
    card(
        FailsAlone,
        "fails-alone",
        "Raises on the rank that could not write, and nowhere else.",
        "torch issue 143536",
        "One machine's disk is full; the others wait in the next step.",
        "failure.on-all-ranks",
    ),
    card(
        StumblesOverLeftovers,
        "stumbles-over-leftovers",
        "Refuses to save while a temporary file is there.",
        "speechturn issue 15; a lock that nobody removes",
        "It takes a failed save first.",
        "failure.next-save-works",
    ),
    card(
        NotStrict,
        "not-strict",
        "Loads what fits and keeps the rest as it was built.",
        "strict=False",
        "The loss starts higher than it was.",
        "mismatch.raises",
    ),
    card(
        CopiesBeforeChecking,
        "copies-before-checking",
        "Copies values into the model and then finds that some do not fit.",
        "Module.load_state_dict raises after it has copied what fits",
        "Who catches the error trains a mixture.",
        "mismatch.changes-nothing",
    ),
    card(
        SaysNotWhat,
        "says-not-what",
        "Says that something does not fit, not what.",
        "a blanket except around loading",
        "It is an error, as it should be.",
        "mismatch.names-the-culprit",
    ),
    card(
        RunsPickles,
        "runs-pickles",
        "Unpickles whatever the file holds.",
        "torch.load(weights_only=False); the metadata of torch.distributed.checkpoint",
        "One's own files are harmless.",
        "safety.runs-no-code",
    ),
    card(
        NewestOrNothing,
        "newest-or-nothing",
        "Gives up where the newest save is damaged.",
        "the newest by name, and no second try",
        "It is an error, and somebody can delete the file; at night nobody does.",
        "damage.older-is-used",
    ),
    card(
        TrustsTheDisk,
        "trusts-the-disk",
        "Loads values in which a bit has been flipped.",
        "torch.load, which ignores the check sums of its own archive",
        "Disks are right, nearly always.",
        "damage.flipped-bit-is-noticed",
    ),
)
