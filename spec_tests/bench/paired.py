"""Paired measurement: how much faster is B than A, on a machine that does other things too?

Two runs one after the other compare the machine with itself. So both are measured in one process
tree, a little of each in turn, and what counts is the ratio inside a round, in which both met the
same machine:

1. `order` gives the arms of a round; every other round runs backwards (A B C, C B A, ...), so
   that whoever is measured first has no lasting advantage.
2. A block's time is the maximum over ranks: a step is over when the slowest rank is.
3. Rounds in which other processes used more than `MAX_OTHERS` of the cores are dropped.
4. `Ratio` is the median over rounds with its 95 % interval: order statistics, no assumption about
   the noise. "B is at most r times A" means that the upper end is at most r.
5. An arm that is A once more (A/A) shows what the machine does to equal things. When its median
   leaves `AA_RANGE`, the whole run is void.

`run_rounds` runs in the ranks, `Found` sums up in the parent.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from spec_tests.bench import machine
from spec_tests.rig.ranks.rank import Context

MAX_OTHERS = 0.08
AA_RANGE = (0.97, 1.03)
FEWEST_ROUNDS = 6  # below this no pair of order statistics covers a median with 95 %


def order(num_arms: int, round_index: int) -> list[int]:
    """Return the arms of a round in the order in which they are measured.

    >>> order(3, 0), order(3, 1)
    ([0, 1, 2], [2, 1, 0])
    """
    arms = list(range(num_arms))
    return arms if round_index % 2 == 0 else arms[::-1]


@dataclass(frozen=True)
class Ratio:
    """A median of paired ratios with the ends of its 95 % interval, over `num_rounds` pairs."""

    median: float
    low: float
    high: float
    num_rounds: int

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def median_interval(values: Sequence[float], *, miss: float = 0.05) -> tuple[float, float]:
    """Return two of the sorted `values` that enclose their true median but for a chance of `miss`.

    A value lies below the median with probability 1/2, so the number that do is binomial.

    >>> median_interval([float(i) for i in range(1, 11)])
    (2.0, 9.0)
    """
    number = len(values)
    if number < FEWEST_ROUNDS:
        return (-math.inf, math.inf)
    below, outside = 0, 0.0
    while True:
        outside += math.comb(number, below) / 2**number
        if 2 * outside > miss:
            break
        below += 1
    return values[below - 1], values[number - below]


# ------------------------------------------------------------------------------------- in the ranks


class Arm:
    """One of the things that are compared, ready to step."""

    @functools.cached_property
    def facts(self) -> dict[str, Any]:
        """What else it showed on this rank, by name: bytes, for example."""
        return {}

    def step(self) -> None:
        """Run what is timed, once."""
        raise NotImplementedError

    def take(self, num_steps: int) -> None:
        """Run so many steps."""
        for _ in range(num_steps):
            self.step()

    def block(self, num_steps: int) -> tuple[float, float]:
        """Run so many steps; return the seconds of one, and its seconds on the cores."""
        start, core_start = time.perf_counter(), time.process_time()
        self.take(num_steps)
        seconds, core_seconds = time.perf_counter() - start, time.process_time() - core_start
        return seconds / num_steps, core_seconds / num_steps


def run_rounds(
    ctx: Context | None, arms: Sequence[Arm], num_steps: int, num_rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """Run so many rounds, or as many as begin within `seconds`, but at least twice the fewest.

    A round is every arm for `num_steps`. Without `ctx` there is no rank but this process.
    """
    began, rounds = time.perf_counter(), []
    for index in range(num_rounds):
        rounds.append(_round(ctx, arms, num_steps, index))
        if math.isinf(seconds):
            continue
        elapsed = torch.tensor([time.perf_counter() - began])
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)  # all ranks stop after the same round
        if elapsed.item() > seconds and len(rounds) >= 2 * FEWEST_ROUNDS:
            break
    return rounds


def _round(ctx: Context | None, arms: Sequence[Arm], num_steps: int, index: int) -> dict[str, Any]:
    """Return seconds per step by arm, and what is needed to tell how busy the machine was."""
    barrier = ctx.barrier if ctx else lambda: None
    seconds, core_seconds = [0.0] * len(arms), [0.0] * len(arms)
    barrier()
    began, busy, own = time.perf_counter(), machine.busy_s(), time.process_time()
    for number in order(len(arms), index):
        barrier()
        seconds[number], core_seconds[number] = arms[number].block(num_steps)
    barrier()
    now = machine.busy_s()
    return {
        "seconds": seconds,
        "core_seconds": core_seconds,
        "elapsed": time.perf_counter() - began,
        "own": time.process_time() - own,
        "busy": None if busy is None or now is None else now - busy,
    }


# ----------------------------------------------------------------------------------- in the parent


@dataclass(frozen=True)
class Found:
    """What one case showed; times are of the quiet rounds, by arm."""

    case: Any
    impls: list[str]  # by the names under which they were given
    facts: dict[str, list[dict[str, Any]]]  # arm to what it showed, rank by rank
    seconds: dict[str, list[float]]  # per round: of a step, on the slowest rank
    core_seconds: dict[str, list[float]]  # per round: of a step, all threads of all ranks
    clock: str  # "seconds" or "core_seconds": which of the two is compared
    num_kept: int  # rounds that were quiet
    num_dropped: int  # rounds in which other processes were busy

    @classmethod
    def of(
        cls,
        case: Any,
        impls: list[str],
        ranks: Sequence[dict[str, Any]],
        clock: str,
        max_others: float,
    ) -> Found:
        """Sum up the `facts` of the arms and the `rounds` of `run_rounds` on each rank.

        Where too few rounds were quiet all are taken, to be shown; `voids` then says so.
        """
        facts = {label: [rank["facts"][label] for rank in ranks] for label in ranks[0]["facts"]}
        rounds = list(zip(*(rank["rounds"] for rank in ranks), strict=True))
        quiet = []
        for of_ranks in rounds:
            own, first = sum(part["own"] for part in of_ranks), of_ranks[0]
            if machine.share_of_others(first["busy"], own, first["elapsed"]) <= max_others:
                quiet.append(of_ranks)
        taken = quiet if len(quiet) >= FEWEST_ROUNDS else rounds
        seconds: dict[str, list[float]] = {}
        core_seconds: dict[str, list[float]] = {}
        for number, label in enumerate(facts):
            seconds[label] = [max(r["seconds"][number] for r in of) for of in taken]
            core_seconds[label] = [sum(r["core_seconds"][number] for r in of) for of in taken]
        num_dropped = len(rounds) - len(quiet)
        return cls(case, impls, facts, seconds, core_seconds, clock, len(quiet), num_dropped)

    @property
    def labels(self) -> list[str]:
        """The arms, in the order of an even round."""
        return list(self.facts)

    def most(self, label: str, fact: str) -> Any:
        """Return the largest value of a fact over ranks."""
        return max(of_rank[fact] for of_rank in self.facts[label])

    def voids(self, base: str, again: str) -> list[str]:
        """Return why no bound can be judged by these; `again` is `base` once more."""
        if self.num_kept < FEWEST_ROUNDS:
            return [
                f"void: {self.num_kept} of {self.num_kept + self.num_dropped} rounds were quiet "
                f"enough, expected at least {FEWEST_ROUNDS}; let nothing else run, or give more "
                "--rounds"
            ]
        aa, (low, high) = self.ratio(again, base), AA_RANGE
        if low <= aa.median <= high:
            return []
        return [f"void: {base} against itself {aa.median:.3f}, expected within {low}-{high}"]

    def ratio(self, measured: str, base: str) -> Ratio:
        """Return one arm beside another, both measured in the same round.

        >>> seconds = {"A": [2.0] * 10, "B": [4.0] * 10}
        >>> str(Found(None, [], {}, seconds, {}, "seconds", 10, 0).ratio("A", "B"))
        '0.500 [0.500, 0.500]'
        """
        times = self.core_seconds if self.clock == "core_seconds" else self.seconds
        pairs = sorted(m / b for m, b in zip(times[measured], times[base], strict=True))
        return Ratio(statistics.median(pairs), *median_interval(pairs), len(pairs))

    def against(self, base: str) -> dict[str, Ratio]:
        """Return every other arm beside `base`."""
        return {label: self.ratio(label, base) for label in self.facts if label != base}

    def ms(self, clock: str = "seconds") -> dict[str, float]:
        """Return the median of a step by arm, in milliseconds of that clock."""
        taken = self.core_seconds if clock == "core_seconds" else self.seconds
        return {label: 1e3 * statistics.median(of) for label, of in taken.items() if of}
