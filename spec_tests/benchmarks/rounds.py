"""Rounds of a paired measurement: run in the ranks, summed up in the parent, written down.

A round is every arm for some steps, one after another; see paired.py for why. `run_rounds` runs
them, `Timings` keeps the quiet ones, and `report` makes the page on which their tables stand.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from spec_tests.benchmarks import paired
from spec_tests.rig.rank import Context


class Steps(Protocol):
    """What can be timed."""

    def step(self) -> None:
        """One optimizer step."""


def run_round(ctx: Context, arms: Sequence[Steps], num_steps: int, index: int) -> dict[str, Any]:
    """Every arm `num_steps` times, in the order of round `index`: seconds per step, and noise."""
    seconds, core_seconds = [0.0] * len(arms), [0.0] * len(arms)
    ctx.barrier()
    began, busy, own = time.perf_counter(), paired.busy_s(), time.process_time()
    for number in paired.order(len(arms), index):
        ctx.barrier()
        start, core_start = time.perf_counter(), time.process_time()
        for _ in range(num_steps):
            arms[number].step()
        seconds[number] = (time.perf_counter() - start) / num_steps
        core_seconds[number] = (time.process_time() - core_start) / num_steps
    ctx.barrier()
    now = paired.busy_s()
    return {
        "seconds": seconds,
        "core_seconds": core_seconds,
        "elapsed": time.perf_counter() - began,
        "own": time.process_time() - own,
        "busy": None if busy is None or now is None else now - busy,
    }


def run_rounds(
    ctx: Context,
    arms: Sequence[Steps],
    num_steps: int,
    num_rounds: int,
    *,
    seconds: float = float("inf"),
) -> list[dict[str, Any]]:
    """So many rounds, or as many as begin within `seconds`, but at least twice the fewest."""
    began, rounds = time.perf_counter(), []
    for index in range(num_rounds):
        rounds.append(run_round(ctx, arms, num_steps, index))
        elapsed = torch.tensor([time.perf_counter() - began])
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)  # all ranks stop after the same round
        if elapsed.item() > seconds and len(rounds) >= 2 * paired.FEWEST_ROUNDS:
            break
    return rounds


@dataclass(frozen=True)
class Timings:
    """What the quiet rounds took.

    Attributes:
        seconds: by arm, per round: of a step, on the slowest rank.
        core_seconds: by arm, per round: of a step, all threads of all ranks.
        num_dropped: rounds in which other processes were busy.
    """

    seconds: dict[str, list[float]]
    core_seconds: dict[str, list[float]]
    num_kept: int
    num_dropped: int

    @classmethod
    def of(
        cls,
        labels: Sequence[str],
        ranks: Sequence[dict[str, Any]],
        *,
        max_others: float = paired.MAX_OTHERS,
    ) -> Timings:
        """Out of what `run_rounds` gave on each rank, under "rounds".

        Where too few rounds were quiet all are taken, to be shown; `voids` then says so.
        """
        seconds: dict[str, list[float]] = {label: [] for label in labels}
        cores: dict[str, list[float]] = {label: [] for label in labels}
        rounds = list(zip(*(rank["rounds"] for rank in ranks), strict=True))
        quiet = [of_ranks for of_ranks in rounds if _share_of_others(of_ranks) <= max_others]
        for of_ranks in quiet if len(quiet) >= paired.FEWEST_ROUNDS else rounds:
            for number, label in enumerate(labels):
                seconds[label].append(max(part["seconds"][number] for part in of_ranks))
                cores[label].append(sum(part["core_seconds"][number] for part in of_ranks))
        return cls(seconds, cores, len(quiet), len(rounds) - len(quiet))

    def voids(self, base: str, again: str) -> list[str]:
        """Why no bound can be judged by these; `again` is `base` once more."""
        if self.num_kept < paired.FEWEST_ROUNDS:
            return [
                f"void: {self.num_kept} of {self.num_kept + self.num_dropped} rounds were quiet "
                f"enough, expected at least {paired.FEWEST_ROUNDS}; let nothing else run"
            ]
        aa = paired.ratio(self.seconds[again], self.seconds[base])
        if not paired.is_void(aa):
            return []
        low, high = paired.AA_RANGE
        return [f"void: {base} against itself {aa.median:.3f}, expected within {low}-{high}"]

    @property
    def ms(self) -> dict[str, float]:
        """By arm, the median."""
        return {label: 1e3 * statistics.median(taken) for label, taken in self.seconds.items()}

    @property
    def core_ms(self) -> dict[str, float]:
        """By arm, the median over all cores."""
        return {label: 1e3 * statistics.median(taken) for label, taken in self.core_seconds.items()}

    def against(self, base: str) -> dict[str, paired.Ratio]:
        """Every other arm beside `base`, round by round."""
        return {
            label: paired.ratio(taken, self.seconds[base])
            for label, taken in self.seconds.items()
            if label != base
        }


def _share_of_others(of_ranks: Sequence[dict[str, Any]]) -> float:
    """Part of the cores that other processes used in a round."""
    own, first = sum(part["own"] for part in of_ranks), of_ranks[0]
    return paired.share_of_others(first["busy"], own, first["elapsed"])


# ----------------------------------------------------------------------------------- a page of it


def verdict(holds: bool, words: str) -> str:
    """One bound."""
    return f"{'holds' if holds else 'missed'}: {words}"


def section(heading: str, rows: Sequence[Sequence[str]], result: Any) -> list[str]:
    """Lines of one table; `result` knows its `num_rounds`, `num_dropped` and `verdicts`."""
    kept = f"{result.num_rounds} rounds kept, {result.num_dropped} dropped as noisy."
    said = [f"- {verdict}" for verdict in result.verdicts]
    return ["", f"## {heading}", "", paired.table(rows), "", kept, "", *said]


def report(
    folder: Path, name: str, title: str, note: str, results: Sequence[Any], sections: list[str]
) -> int:
    """Print and write the page; the exit status: 1 where anything is missed or void."""
    environment = paired.environment()
    head = [f"# {title}", "", *[f"- {key}: {value}" for key, value in environment.items()]]
    text = "\n".join([*head, f"- {note}", *sections]) + "\n"
    print(text)
    record = {"environment": environment, "results": [asdict(result) for result in results]}
    paired.write(folder, name, text, record)
    return int(any(not said.startswith("holds") for r in results for said in r.verdicts))
