"""OUT/results.json: everything that the page shows, gathered from what the runs left behind.

{
  "schema": "trainspec-demo/1",
  "model": "gpt2 tiny", "parameters": 1088256, "tokens_per_step": 2048, "steps": 30,
  "device": "cpu", "torch": "2.13.0", "seconds": 190.0,
  "bounds": [{"what": "losses", "largest": 1e-6, "allowed": 1e-5}],
  "problems": ["FAILED: ..."],              empty when all checks hold
  "runs": [{
    "title": "ours, FSDP", "num_ranks": 2, "kind": "fsdp_full_shard",
    "losses": [7.6, ...], "differences": [0.0, 1e-7, ...],     from the first run, per step
    "distance": {"loss": 1e-6, "grad_norm": 1e-6},             the largest of all steps
    "tokens_per_s": 5000.0,
    "memory": {"measured": {"parameters": ..., ...}, "predicted": {...}, "peak": [...]},
    "traffic": {"collectives": {"allreduce_": {"count": 4, "bytes": 4353024}},
                "bytes": ..., "theory_bytes": ..., "reason": "P: every gradient once"},
    "timeline": [{"rank": 0, "duration_us": ..., "compute": [[0, 10], ...], ...}],  or []
    "weights": "1f2e..."
  }],
  "conformance": {"command": "...", "implementations": ["solution"],
                  "rows": [{"chapter": "ddp", "cells": {"solution": {"passed": 51, ...}}}]}
}                                           or null
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from solution.demo.checks import distance
from solution.demo.runs import GLOBAL_BATCH, SEQUENCE_LENGTH, Run
from solution.demo.theory import REASONS, Theory
from solution.measure.intervals import merged
from solution.measure.trace import LANES, step_lanes
from solution.measure.trace_file import TraceError, read_trace

__all__ = ["SCHEMA", "conformance", "gather"]

SCHEMA = "trainspec-demo/1"
FINEST = 1500  # parts of a step: gaps below one such part are not drawn


def gather(runs: Sequence[Run], theory: Theory, out: Path) -> dict[str, Any]:
    """Return all of it but the checks, the conformance and the seconds."""
    first = runs[0].summaries(out)[0]
    config = first["config"]
    return {
        "schema": SCHEMA,
        "model": f"{config['model']} {config['preset']}",
        "parameters": first["parameter_bytes"] // 4,
        "tokens_per_step": GLOBAL_BATCH * SEQUENCE_LENGTH,
        "steps": first["steps"],
        "device": first["device"],
        "torch": torch.__version__,
        "runs": [_gather_run(run, runs[0], theory, out) for run in runs],
    }


def _gather_run(run: Run, baseline: Run, theory: Theory, out: Path) -> dict[str, Any]:
    summaries = run.summaries(out)
    losses, others = run.curve(out), baseline.curve(out)
    held = [summary["held_bytes"] for summary in summaries]
    traces = sorted(run.traces(out).rglob("rank*_trace.json"))
    return {
        "title": run.title,
        "kind": run.kind,
        "num_ranks": run.num_ranks,
        "losses": losses,
        "differences": [abs(a - b) for a, b in zip(losses, others, strict=True)],
        "distance": {key: distance(run, baseline, out, key) for key in ("loss", "grad_norm")},
        "tokens_per_s": summaries[0]["tokens_per_s"],
        "memory": {
            "measured": {name: max(one[name] for one in held) for name in held[0]},
            "predicted": theory.held(run),
            "peak": [summary["peak_memory_bytes"] for summary in summaries],
        },
        "traffic": {
            "collectives": summaries[0]["collectives"],
            "bytes": summaries[0]["bytes_per_step"],
            "theory_bytes": theory.sent(run),
            "reason": REASONS[run.kind],
        },
        "timeline": [lanes for path in traces for lanes in _timeline(path)],
        "weights": summaries[0]["weights_sha256"],
    }


def _timeline(path: Path) -> list[dict[str, Any]]:
    """Return the last recorded step of one rank, as coarse as it can be drawn; microseconds."""
    try:
        found = step_lanes(read_trace(path))[-1].from_begin()
    except TraceError:
        return []  # the page leaves out what cannot be read
    finest = found["duration_us"] / FINEST
    for lane in LANES:
        parts = merged(found[lane], gap=finest)
        found[lane] = [[round(begin, 1), round(end, 1)] for begin, end in parts]
    return [found]


def conformance(path: Path) -> dict[str, Any] | None:
    """Return chapter by implementation, of the specification's report; None if there is none."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if report.get("schema") != "trainspec-report/1" or not report["complete"]:
        return None
    names = [found["name"] for found in report["implementations"]]
    rows: dict[str, dict[str, dict[str, int]]] = {}
    for clause in report["clauses"]:
        if clause["strength"] != "MUST":
            continue
        chapter = rows.setdefault(clause["chapter"], {})
        for name, cell in clause["cells"].items():
            counted = chapter.setdefault(name, {})
            counted[cell["outcome"]] = counted.get(cell["outcome"], 0) + 1
    return {
        "command": report["run"].get("command", ""),
        "text": report["verdict"]["text"],
        "implementations": names,
        "rows": [{"chapter": chapter, "cells": cells} for chapter, cells in rows.items()],
    }
