"""The checks of the runs, and the table on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from solution.console import aligned
from solution.demo.runs import RUNS, Run

MARGIN = 10.0  # between two right runs that differ in rounding, the control being one such pair


def check(results: Mapping[str, Any], out: Path) -> list[str]:
    """Return what does not hold, one line each."""
    _, control, *others = results["runs"]
    problems = []
    # Adam and clipping hide a gradient of the wrong size from the loss, but not from its own norm.
    for key, title in (("loss", "losses"), ("grad_norm", "gradient norms")):
        rounding = 8 * torch.finfo(torch.float32).eps * max(RUNS[0].curve(out, key))
        allowed = MARGIN * control["distance"][key] + rounding
        largest = max(one["distance"][key] for one in others)
        said = f"{title}: at most {largest:.1e} from one rank; allowed {allowed:.1e}"
        print(f"{said} ({MARGIN:.0f} x control + 8 ulp)")
        if not largest <= allowed:
            problems.append(f"FAILED: expected equal curves of {said}")
    losses = results["runs"][0]["losses"]
    if not losses[-1] < losses[0]:
        problems.append(f"FAILED: expected the loss to fall, got {losses[0]} to {losses[-1]}")
    for run, gathered in zip(RUNS[2:], others, strict=True):
        problems += _check_ranks(run, gathered["traffic"]["theory_bytes"], out)
        if run.is_killed:
            same = next(one for one in RUNS if (one.name, one.kind) == (run.name, run.kind))
            problems += _check_restart(run, same, out)
    return problems


def _check_restart(run: Run, same: Run, out: Path) -> list[str]:
    """Return problems unless a run that was killed and restarted equals one that was not."""
    if not run.was_restarted(out):
        return [f"FAILED: {run.title}: expected another process after the kill, got the same"]
    differing = [
        key for key in ("loss", "grad_norm", "lr") if run.curve(out, key) != same.curve(out, key)
    ]
    weights = {s["weights_sha256"] for one in (run, same) for s in one.summaries(out)}
    if differing or len(weights) != 1:
        said = f"{', '.join(differing) or 'no curve'} differ, weights {weights}"
        return [f"FAILED: {run.title}: expected the bits of {same.title}, got: {said}"]
    print(f"{run.title}: every loss, norm and weight equal to those of {same.title}, bit for bit")
    return []


def _check_ranks(run: Run, expected: int, out: Path) -> list[str]:
    summaries = run.summaries(out)
    weights = {summary["weights_sha256"] for summary in summaries}
    problems = []
    if len(weights) != 1:
        problems.append(f"FAILED: {run.title}: expected equal weights on all ranks, got {weights}")
    return problems + [
        f"FAILED: {run.title}, rank {summary['rank']}: expected {expected} bytes per step, as its "
        f"algorithm needs, got {summary['bytes_per_step']} "
        f"({summary['bytes_per_step'] / max(expected, 1):.2f} x)"
        for summary in summaries
        if summary["bytes_per_step"] != expected
    ]


def table(results: Mapping[str, Any]) -> str:
    """Return one line per run: where it ended, how far from one rank, what it cost."""
    rows = [["", "last loss", "differs", "norms", "tokens/s", "sent MB", "theory", "weights"]]
    rows += [
        [
            run["title"],
            f"{run['losses'][-1]:.6f}",
            f"{run['distance']['loss']:.1e}",
            f"{run['distance']['grad_norm']:.1e}",
            f"{run['tokens_per_s']:,.0f}",
            f"{run['traffic']['bytes'] / 1e6:.2f}",
            f"{run['traffic']['theory_bytes'] / 1e6:.2f}",
            run["weights"][:8],
        ]
        for run in results["runs"]
    ]
    return aligned(rows)
