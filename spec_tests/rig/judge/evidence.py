"""Evidence: what a page draws of a finding, kept as small plain data beside its message.

    wrong    {"name", "shape", "ranks": {rank: [cells, rows, columns]}}
    lanes    [{"rank", "state", "waits", "calls": [[operation, number, group], ...]}, ...]
    memory   {"rank", "points": [[moment, bytes], ...], "judged": index, "allowed": bytes}

`wrong` is the first wrong tensor on each rank, row by row: "0" right, "1" wrong, "x" wrong and not
finite, "-" nothing to compare. Larger tensors are pooled: a cell shows the worst of its elements.
`lanes` are the last collectives of each rank, oldest first. `memory` is what one rank held over
time, or a single number.

It is computed when something has failed, and only then. Each kind has a bound, so that a log stays
small: about 1 KB for a case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spec_tests.rig.judge.symptoms import Finding, gap
from spec_tests.rig.ranks.errors import RankDied, RankHung, RankRaised

Evidence = dict[str, Any]
"""Some of the keys above, or none."""

MAX_POINTS = 64
_MAX_RANKS = 8
_MAX_WORDS = 80
_SIDE = 16  # cells of a grid along one side, for up to `_FEW` ranks; above that half as many
_FEW = 4
_CELLS = {-1: "-", 0: "0", 1: "1", 2: "x"}


def of(error: BaseException | None) -> Evidence:
    """Return what an exception has brought along, or can tell of the ranks' collectives."""
    if isinstance(error, RankHung | RankDied):
        return _lanes(error)
    if isinstance(error, RankRaised) and error.error.kind == "CollectiveMismatch":
        return _lanes(error)
    found: Evidence = getattr(error, "evidence", {})
    return found


# ------------------------------------------------------------------------------- wrong tensors


def of_wrong_tensors(findings: Sequence[Finding], wanted: Sequence[Mapping[str, Any]]) -> Evidence:
    """Return which elements of the first wrong tensor are wrong, by rank.

    Args:
        findings: every wrong tensor; a rank without one for the same name is right.
        wanted: what each rank should hold.
    """
    first = findings[0]
    if first.missing() or first.wanted is None or first.wanted.numel() < 2:
        return {}
    own = {finding.rank: finding for finding in findings if finding.name == first.name}
    side = _SIDE if len(wanted) <= _FEW else _SIDE // 2
    grids = {
        str(rank): _grid(_codes(own.get(rank), tensor), side)
        for rank, tensors in list(enumerate(wanted))[:_MAX_RANKS]
        if (tensor := tensors.get(first.name)) is not None and tensor.numel()
    }
    return {"wrong": {"name": first.name, "shape": list(first.wanted.shape), "ranks": grids}}


def _codes(finding: Finding | None, wanted: torch.Tensor) -> torch.Tensor:
    """A key of `_CELLS` for each element."""
    if finding is None:
        return torch.zeros(wanted.shape)
    if finding.missing() or finding.seen is None:
        return torch.full(wanted.shape, -1.0)
    is_wrong = gap(finding.seen, wanted) > finding.allowed
    return is_wrong.float() + (is_wrong & ~finding.seen.isfinite())


def _grid(codes: torch.Tensor, side: int) -> list[Any]:
    """The cells of a grid as one text, then its rows and columns."""
    if codes.dim() < 2:  # a vector breaks into lines, and the end of the last one stays empty
        flat = codes.reshape(-1)
        columns = min(len(flat), side) if len(flat) <= side**2 else -(-len(flat) // side)
        missing = -len(flat) % max(1, columns)
        codes = torch.nn.functional.pad(flat, (0, missing), value=-1.0).reshape(-1, columns)
    plane = codes.flatten(1)
    kernel = [max(1, -(-length // side)) for length in plane.shape]
    pooled = torch.nn.functional.max_pool2d(plane[None].cpu(), kernel, ceil_mode=True)[0]
    cells = "".join(_CELLS[int(code)] for code in pooled.reshape(-1))
    return [cells, *pooled.shape]


# --------------------------------------------------------------------------------- collectives


def _lanes(error: RankHung | RankDied | RankRaised) -> Evidence:
    """Return the last collectives of each rank, if any are known."""
    if not any(report.collectives for report in error.ranks):
        return {}
    is_blocked = isinstance(error, RankHung) and not error.was_computing
    return {
        "lanes": [
            {
                "rank": report.rank,
                "state": report.state[:_MAX_WORDS],
                "waits": is_blocked and report.state == "in the body",
                "calls": [_call(words) for words in report.collectives],
            }
            for report in error.ranks[:_MAX_RANKS]
        ]
    }


def _call(words: str) -> list[Any]:
    """`all_reduce [[5, 6]] #8 of 0` as operation, number and group."""
    what, _, place = words.rpartition(" #")
    number, _, group = place.partition(" of ")
    return [what[:_MAX_WORDS], int(number) if number.isdigit() else 0, group[:_MAX_WORDS]]


# -------------------------------------------------------------------------------------- memory


def of_memory(rank: int, points: Sequence[Sequence[Any]], judged: int, allowed: int) -> Evidence:
    """Return what a rank held over time; `judged` is the index of the point that is too high."""
    first = max(0, min(judged - MAX_POINTS // 2, len(points) - MAX_POINTS))
    kept = [[moment[:_MAX_WORDS], size] for moment, size in points[first : first + MAX_POINTS]]
    return {"memory": {"rank": rank, "points": kept, "judged": judged - first, "allowed": allowed}}
