"""`python -m spec_tests.rig_tests.faults [--count 100] [--seed 0]`: break ranks, time the report.

Injects faults of every kind into every rank of worlds of 2, 3 and 4, in a seeded order, and holds
the rig to its promises: the right kind of outcome, the right culprit, in time, a healthy world
afterwards, and no process left at the end. Exit status 1 if any of that fails.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spec_tests.rig.ranks.errors import RankDied, RankHung, RankRaised
from spec_tests.rig.ranks.world import Worlds
from spec_tests.rig_tests import bodies

SIZES = (2, 3, 4)
LIMITS_S = {"raise": 2.0, "exit": 2.0, "sigkill": 2.0, "hang": 5.0, "mismatch": 5.0}
"""Kind of fault to the time in which the design wants it reported."""


@dataclass(frozen=True)
class Fault:
    """Rank `culprit` of `size` fails in the way called `kind`."""

    kind: str
    size: int
    culprit: int


@dataclass(frozen=True)
class Finding:
    """How a fault was reported; `complaint` is empty if all is well."""

    fault: Fault
    seconds: float
    complaint: str


def plan(count: int, seed: int) -> list[Fault]:
    """`count` faults, every combination as evenly often as it goes, in a seeded order."""
    every = [
        Fault(kind, size, culprit) for kind in LIMITS_S for size in SIZES for culprit in range(size)
    ]
    generator = random.Random(seed)
    drawn: list[Fault] = []
    while len(drawn) < count:
        drawn += generator.sample(every, len(every))
    return drawn[:count]


def inject(fault: Fault, worlds: Worlds) -> Finding:
    """Break a rank, judge the report, and see that the next call works."""
    world = worlds.world(fault.size)
    world.run(bodies.empty)  # the start of a pool is not the report of a fault
    begun = time.perf_counter()
    try:
        value = world.run(bodies.fail, fault.kind, fault.culprit)
        complaint = f"went unnoticed, the ranks returned {value}"
    except (RankRaised, RankDied, RankHung) as failure:
        complaint = wrong_verdict(fault, failure)
    seconds = time.perf_counter() - begun
    if world.run(bodies.total, [1.0])[0].item() != sum(range(1, fault.size + 1)):
        complaint = complaint or "the world is not healthy afterwards"
    return Finding(fault, seconds, complaint)


def wrong_verdict(fault: Fault, failure: BaseException) -> str:
    """What is wrong about the report of a fault; empty if nothing is."""
    wanted = {"raise": RankRaised, "exit": RankRaised, "sigkill": RankDied, "hang": RankHung}
    # Whether unequal sizes end a process or block it is gloo's affair.
    kinds = wanted.get(fault.kind, (RankRaised, RankDied, RankHung))
    if not isinstance(failure, kinds) or not isinstance(failure, RankRaised | RankDied | RankHung):
        return f"expected {kinds}, got {type(failure).__name__}: {failure}"
    if fault.kind == "mismatch":
        sizes = [size for report in failure.ranks for size in report.collectives]
        is_told = "mismatch" in str(failure) or any("[[7]]" in size for size in sizes)
        return "" if is_told else f"nothing tells of a mismatch: {failure}"
    if fault.kind == "hang":
        stacks = {report.rank: report.stack for report in failure.ranks}
        is_told = "time.sleep" in stacks[fault.culprit] and fault.culprit in stacks
        return "" if is_told else f"rank {fault.culprit} is not seen to sleep: {failure}"
    if failure.primary != fault.culprit:
        return f"blames rank {failure.primary}, it was rank {fault.culprit}"
    words = {"raise": "KeyError", "exit": "SystemExit: 3", "sigkill": "killed by SIGKILL"}
    is_told = words[fault.kind] in failure.headline
    return "" if is_told else f"expected {words[fault.kind]!r} in {failure.headline!r}"


def table(findings: Sequence[Finding]) -> str:
    """Kind by count, median, longest, limit, wrong verdicts."""
    lines = [
        "| fault | count | median s | max s | limit s | wrong verdicts |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for kind, limit in LIMITS_S.items():
        found = [finding for finding in findings if finding.fault.kind == kind]
        if not found:
            continue
        seconds = [finding.seconds for finding in found]
        wrong = sum(bool(finding.complaint) for finding in found)
        lines.append(
            f"| {kind} | {len(found)} | {statistics.median(seconds):.2f} | {max(seconds):.2f} | "
            f"{limit:.0f} | {wrong} |"
        )
    return "\n".join(lines)


def complaints(findings: Sequence[Finding]) -> list[str]:
    """Wrong verdicts and late reports, one line each."""
    wrong = [f"{f.fault}: {f.complaint}" for f in findings if f.complaint]
    late = [
        f"{f.fault}: reported after {f.seconds:.2f} s, expected {LIMITS_S[f.fault.kind]} s"
        for f in findings
        if f.seconds > LIMITS_S[f.fault.kind]
    ]
    return wrong + late


def alive(pids: Iterable[int]) -> list[int]:
    """Those of `pids` that still exist."""
    found = []
    for pid in pids:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            continue
        found.append(pid)
    return sorted(found)


def main(arguments: Sequence[str]) -> int:
    """The command; 0 if every promise was kept."""
    parser = argparse.ArgumentParser(prog="python -m spec_tests.rig_tests.faults")
    parser.add_argument("--count", type=int, default=100, help="how many faults")
    parser.add_argument("--seed", type=int, default=0, help="of their order")
    options = parser.parse_args(arguments)
    worlds, pids, findings = Worlds(), set[int](), []
    begun = time.perf_counter()
    try:
        for fault in plan(options.count, options.seed):
            pids.update(worlds.pool(fault.size, None, worlds.transport).pids())
            findings.append(inject(fault, worlds))
            pids.update(worlds.pool(fault.size, None, worlds.transport).pids())
    finally:
        worlds.close()
    left = alive(pids)
    found = complaints(findings) + [f"process {pid} is left" for pid in left]
    took = time.perf_counter() - begun
    lines = [
        table(findings),
        "",
        *found,
        f"{len(pids)} ranks lived, {len(left)} are left; {took:.0f} s",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
