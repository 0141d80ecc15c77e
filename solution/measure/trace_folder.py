"""The traces of a run, all ranks together, and of several runs side by side.

    outputs/traces/          a folder of setups
        baseline/            one run
            rank0_trace.json
        ddp/
            rank0_trace.json  rank1_trace.json

Files are read one after another and dropped again; what stays is small. Files of different runs in
one folder are refused: their mean would be of nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from solution.measure.operators import OperatorUse, memory_over_time, operators_per_step, typical
from solution.measure.trace import step_lanes, summarize
from solution.measure.trace_file import TraceError, read_trace

__all__ = ["RankTrace", "find_setups", "read_setup", "step_timeline"]

_NAME = re.compile(r"rank(\d+)_trace\.json(\.gz)?")


@dataclass(frozen=True)
class RankTrace:
    """What is kept of one rank's trace.

    Attributes:
        path: of the file.
        summary: the keys of the contract (`summarize_trace`).
        operators: by name, per step.
        memory: microseconds since the first step, bytes.
        timeline: one typical step as lanes of intervals (`Lanes.from_begin`).
    """

    path: Path
    summary: dict[str, Any]
    operators: dict[str, OperatorUse]
    memory: list[tuple[float, int]]
    timeline: dict[str, Any]

    @classmethod
    def read(cls, path: Path, *, step: int | None = None) -> RankTrace:
        """One file; `step` is the number of the step to show, None takes that of median duration.

        Raises:
            TraceError: no whole trace, or none of that step.
        """
        trace = read_trace(path)
        lanes = step_lanes(trace)
        numbers = [one.step for one in lanes]
        if step is not None and step not in numbers:
            raise TraceError(f"{path}: expected step {step}, got {numbers}; choose one of these")
        index = typical(lanes) if step is None else numbers.index(step)
        return cls(
            path,
            summarize(trace, lanes),
            operators_per_step(trace, lanes),
            memory_over_time(trace, lanes),
            lanes[index].from_begin(),
        )


def find_setups(folder: str | PathLike[str]) -> dict[str, list[Path]]:
    """Setup to its files, by rank: those of each subfolder, or those of the folder itself.

    Raises:
        TraceError: there is none.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise TraceError(
            f"{folder}: expected a folder of traces, got none; record some with "
            "`python -m solution.train_baseline --profile-steps 3`"
        )
    own = _ranks(folder)
    if own:
        return {folder.resolve().name: own}
    found = {sub.name: _ranks(sub) for sub in sorted(folder.iterdir()) if sub.is_dir()}
    found = {name: paths for name, paths in found.items() if paths}
    if not found:
        raise TraceError(
            f"{folder}: expected SETUP/rankN_trace.json, got no such file; record some with "
            "`python -m solution.train_baseline --profile-steps 3`"
        )
    return found


def read_setup(paths: list[Path], *, step: int | None = None) -> list[RankTrace]:
    """All ranks of one run, in order.

    Raises:
        TraceError: a bad file, a rank that is missing or there twice, or files of several runs.
    """
    ranks: list[RankTrace] = []
    for path in paths:
        rank = RankTrace.read(path, step=step)
        _check(rank, ranks)
        ranks.append(rank)
        if step is None:  # all ranks show the same one
            step = rank.timeline["step"]
    world_size = ranks[0].summary["world_size"]
    if len(ranks) != world_size:
        there = [rank.summary["rank"] for rank in ranks]
        raise TraceError(
            f"{ranks[0].path.parent}: expected the traces of {world_size} ranks, got those of "
            f"{there}; copy the others there as well"
        )
    return ranks


def step_timeline(folder: str | PathLike[str], *, step: int | None = None) -> list[dict[str, Any]]:
    """One step of one run, as lanes to draw: a dict per rank, in order.

    Keys: `rank`, `step`, `duration_us`, and `compute`, `communication`, `overlap`, `exposed`, each
    a list of `[begin, end]` in microseconds from the begin of the step on that rank.

    Args:
        folder: with rankN_trace.json.
        step: its number; None takes the step of median duration on the first rank.

    Raises:
        TraceError: as `read_setup`.
    """
    (paths,) = find_setups(folder).values()
    return [rank.timeline for rank in read_setup(paths, step=step)]


def _ranks(folder: Path) -> list[Path]:
    found = {path: match for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))}
    return sorted(found, key=lambda path: (int(found[path][1]), path.name))


def _check(new: RankTrace, earlier: list[RankTrace]) -> None:
    """That a file belongs to those before it."""
    match = _NAME.fullmatch(new.path.name)
    said, name = new.summary["rank"], int(match[1]) if match else new.summary["rank"]
    if said != name:
        raise TraceError(
            f"{new.path}: expected the trace of rank {name}, got one of rank {said}; it was "
            "renamed, or belongs to another run"
        )
    if any(said == other.summary["rank"] for other in earlier):
        raise TraceError(f"{new.path}: expected one trace of rank {said}, got two; remove one")
    for key in ("world_size", "device"):
        other = earlier[0].summary[key] if earlier else new.summary[key]
        if new.summary[key] != other:
            raise TraceError(
                f"{new.path}: expected {key} {other} as in {earlier[0].path.name}, got "
                f"{new.summary[key]}; files of different runs lie in one folder"
            )
    numbers = [step["step"] for step in new.summary["steps"]]
    wanted = [step["step"] for step in (earlier or [new])[0].summary["steps"]]
    if numbers != wanted:
        raise TraceError(
            f"{new.path}: expected steps {wanted} as in {earlier[0].path.name}, got {numbers}; "
            "files of different runs lie in one folder"
        )
