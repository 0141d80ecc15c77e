"""Folders of checkpoints: names, completion markers, retention; and steps that all ranks take.

A folder is complete when its marker lists files that are all there with their sizes. The marker is
written last and the folder gets its name after that, so a crash at any moment leaves either a
complete folder or one that nobody takes for one. No save ever writes into a folder that has its
final name; saving a step a second time makes `step-00000010.1`, which counts as newer. One rank
uses these functions for all.

A step of a save or a load is taken by all ranks or by none (`together`). Disks fill up on one
machine only. A rank that leaves alone lets the others wait for ever in the next collective, so
every step ends with all ranks telling each other how it went.
"""

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from torch.distributed.checkpoint.api import CheckpointException

from solution import comm
from solution.data.shards import flush_folder, write_atomically

FORMAT = 1
MARKER = "complete.json"
_FINAL = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_TEMPORARY = re.compile(r"\.step-\d{8,}(\.\d+)?\.(tmp|old)")

Result = TypeVar("Result")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved or loaded; raised on all ranks alike."""


def together(
    what: str, work: Callable[[], Result], group: comm.Group, *, by_first: bool = False
) -> Result:
    """Do `work` on every rank of `group`, or on the first one for all; return its result.

    Args:
        what: the step, for the message: "write its part of runs/step-00000010".
        by_first: only the first rank works, and every rank returns its result.

    Raises:
        CheckpointError: on all ranks, when it failed on one that works; says on which, and how.
    """
    result, cause = None, None
    if comm.rank(group) == 0 or not by_first:
        try:
            result = work()
        except (Exception, CheckpointException) as error:  # the library's is no Exception
            cause = error
    found = comm.gather_objects((result if by_first else None, _describe(cause)), group)
    errors = [text for _, text in found]
    reasons = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(errors) if text)
    if len(errors) > 1 and len(set(errors)) == 1:
        reasons = errors[0] and f"on all ranks: {errors[0]}"
    if reasons:
        who = "the first rank" if by_first else "every rank"
        raise CheckpointError(
            f"rank {comm.rank(group)}: expected {who} to {what}, got {reasons}"
        ) from cause
    return cast(Result, found[0][0] if by_first else result)


def _describe(error: BaseException | None) -> str:
    if isinstance(error, CheckpointException):
        causes = ((rank, failure[0]) for rank, failure in error.failures.items())
        return "; ".join(f"({rank}) {type(e).__name__}: {e}" for rank, e in causes)
    if error is None or isinstance(error, CheckpointError):
        return str(error or "")
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True, order=True)
class Folder:
    """A complete checkpoint; the newest is the largest."""

    step: int
    attempt: int  # the same step was saved before
    path: Path


def latest_step(directory: str | os.PathLike[str]) -> int | None:
    """Step of the newest complete checkpoint below `directory`; None if there is none."""
    found, _ = complete_folders(Path(directory))
    return found[0].step if found else None


def complete_folders(root: Path) -> tuple[list[Folder], list[str]]:
    """Complete checkpoints, newest first, and what is wrong with the folders that are not."""
    found, complaints = [], []
    for path in root.iterdir() if root.is_dir() else ():
        name = _FINAL.fullmatch(path.name)
        if name is not None:
            try:
                read_marker(path)
            except (OSError, ValueError) as error:
                complaints.append(f"{path.name}: {error}")
            else:
                found.append(Folder(int(name[1]), int(name[2] or 0), path))
        elif _TEMPORARY.fullmatch(path.name):
            complaints.append(f"{path.name}: the save was interrupted, or is still under way")
    return sorted(found, reverse=True), sorted(complaints)


def read_marker(path: Path) -> dict[str, Any]:
    """The marker of a complete folder.

    Raises:
        ValueError: it is no marker of ours, or a file that it lists is missing or truncated.
        OSError: there is none.
    """
    marker = json.loads((path / MARKER).read_bytes())  # its error is a ValueError
    if not isinstance(marker, dict) or not isinstance(marker.get("files"), dict):
        raise ValueError(f"expected {MARKER} to list the files, got {str(marker)[:80]}")
    if marker.get("format") != FORMAT:
        raise ValueError(
            f"expected format {FORMAT}, got {marker.get('format')}; it was written by another "
            "version of this library, load it with that one"
        )
    for name, size in marker["files"].items():
        actual = (path / name).stat().st_size if (path / name).is_file() else None
        if actual != size:
            raise ValueError(f"expected {name} of {size} bytes, got {actual}")
    return marker


def begin(root: Path, step: int) -> Path:
    """A fresh hidden folder for a save of `step`; what killed saves left behind is removed."""
    root.mkdir(parents=True, exist_ok=True)
    taken = []
    for path in root.iterdir():
        if _TEMPORARY.fullmatch(path.name):
            if path.is_file():
                path.unlink()
            shutil.rmtree(path, ignore_errors=True)
        name = _FINAL.fullmatch(path.name)
        if name is not None and int(name[1]) == step:
            taken.append(int(name[2] or 0))
    attempt = f".{max(taken) + 1}" if taken else ""
    temporary = root / f".step-{step:08d}{attempt}.tmp"
    temporary.mkdir()  # fails where it could not be removed: nothing old may be mixed in
    return temporary


def finish(temporary: Path, facts: dict[str, Any]) -> Path:
    """Make a written folder a complete checkpoint; returns where it lies now."""
    files = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
    marker = {"format": FORMAT, **facts, "files": files}
    write_atomically(temporary / MARKER, json.dumps(marker, indent=1).encode())
    final = temporary.with_name(temporary.name.removeprefix(".").removesuffix(".tmp"))
    temporary.rename(final)
    flush_folder(final.parent)
    return final


def retain(root: Path, just_saved: Path, keep: int | None) -> None:
    """Remove all but the newest `keep` steps, and earlier saves of the same step.

    The one just saved always stays. A folder that cannot be removed stays too, with a warning: the
    new checkpoint is safe, and training need not end for it.
    """
    try:
        found, _ = complete_folders(root)
    except OSError as error:
        warnings.warn(f"{root}: cannot look for old checkpoints: {error}", stacklevel=2)
        return
    newest: dict[int, Folder] = {}  # of each step, the newest step first
    for folder in found:
        newest.setdefault(folder.step, folder)
    kept = list(newest.values())[:keep]
    for folder in found:
        if folder.path == just_saved or folder in kept:
            continue
        try:
            # Hidden first: half removed it must not look like a checkpoint.
            hidden = root / f".{folder.path.name}.old"
            folder.path.rename(hidden)
            shutil.rmtree(hidden)
        except OSError as error:
            warnings.warn(f"{folder.path}: cannot remove this checkpoint: {error}", stacklevel=2)
