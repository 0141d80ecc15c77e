"""OUT/results.json: everything that the page shows, gathered from what the runs left behind.

`THEORY` predicts what each kind of run holds and sends. Gradients are those that the update reads;
AdamW keeps two moments, and a step count of 4 bytes per tensor. Bytes are those that a rank hands
to its collectives (`solution.measure.traffic`). Activations, of one micro-batch, are predicted with
fake tensors and do not depend on the ranks.
"""

import functools
import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from solution.config import GPT2Config
from solution.console import aligned
from solution.demo.runs import GLOBAL_BATCH, RUNS, SEQUENCE_LENGTH, Run
from solution.measure.intervals import merged
from solution.measure.memory import predict
from solution.measure.trace import LANES, step_lanes
from solution.measure.trace_file import read_trace
from solution.models import families

MARGIN = 10.0  # between two right runs that differ in rounding, the control being one such pair
FINEST = 1500  # parts of a step: gaps below one such part are not drawn


class Theory(NamedTuple):
    """What a kind of run needs: of P bytes of parameters, B of them in blocks, M micro-batches."""

    divides: str  # over the ranks: "state" of AdamW; "all", gradients and parameters as well
    sent_bytes: Callable[[int, int, int], int]  # in a step, of P, B and M
    reason: str


_EVERY_GRADIENT = Theory("", lambda p, b, m: p, "P: every gradient once")
_GATHERS = "M(P + B) + P: blocks gathered for forward and backward, gradients once"
THEORY = {
    "alone": Theory("", lambda p, b, m: 0, "nothing: one rank"),
    "ddp": _EVERY_GRADIENT,
    "zero1": Theory("state", lambda p, b, m: 2 * p, "2P: every gradient, then every new weight"),
    "fsdp_no_shard": _EVERY_GRADIENT,
    "fsdp_shard_grad_op": Theory(
        "all", lambda p, b, m: m * p + p, "MP + P: a gather per micro-batch, gradients once"
    ),
    "fsdp_full_shard": Theory("all", lambda p, b, m: m * (p + b) + p, _GATHERS),
}


def gather(config: GPT2Config, attention: str, out: Path) -> dict[str, Any]:
    """Return all of it but the checks, the conformance and the seconds."""
    first = RUNS[0].summaries(out)[0]
    return {
        "schema": "trainspec-demo/1",
        "model": f"{first['config']['model']} {first['config']['preset']}",
        "parameters": first["parameter_bytes"] // 4,
        "tokens_per_step": GLOBAL_BATCH * SEQUENCE_LENGTH,
        "steps": first["steps"],
        "device": first["device"],
        "torch": torch.__version__,
        "runs": [_gather_run(run, config, attention, out) for run in RUNS],
    }


def _gather_run(run: Run, config: GPT2Config, attention: str, out: Path) -> dict[str, Any]:
    summaries = run.summaries(out)
    held = [summary["held_bytes"] for summary in summaries]
    traces = sorted(run.traces(out).rglob("rank*_trace.json"))
    predicted, sent = _theory(run, config, attention)

    def differences(key: str) -> list[float]:
        pairs = zip(run.curve(out, key), RUNS[0].curve(out, key), strict=True)
        return [abs(a - b) for a, b in pairs]

    return {
        "title": run.title,
        "kind": run.kind,
        "num_ranks": run.num_ranks,
        "losses": run.curve(out, "loss"),
        "differences": differences("loss"),  # from the first run, per step
        "distance": {key: max(differences(key)) for key in ("loss", "grad_norm")},  # the largest
        "tokens_per_s": summaries[0]["tokens_per_s"],
        "memory": {
            "measured": {name: max(one[name] for one in held) for name in held[0]},
            "predicted": predicted,
            "peak": [summary["peak_memory_bytes"] for summary in summaries],
        },
        "traffic": {
            "collectives": summaries[0]["collectives"],
            "bytes": summaries[0]["bytes_per_step"],
            "theory_bytes": sent,
            "reason": THEORY[run.kind].reason,
        },
        "timeline": [_timeline(path) for path in traces],
        "weights": summaries[0]["weights_sha256"],
    }


def _theory(run: Run, config: GPT2Config, attention: str) -> tuple[dict[str, int], int]:
    """Return the bytes per rank by component, and those sent per step."""
    with torch.device("meta"):
        model = families.build(config)
    tensors, of_blocks = list(model.parameters()), model.blocks.parameters()
    whole, blocks = sum(p.nbytes for p in tensors), sum(p.nbytes for p in of_blocks)
    theory, passes = THEORY[run.kind], GLOBAL_BATCH // (run.micro_batch * run.num_ranks)
    kept = whole // run.num_ranks if theory.divides == "all" else whole
    state = whole // run.num_ranks if theory.divides else whole
    # A shard of each tensor has a count of its own.
    counts = 4 * len(tensors) // (run.num_ranks if run.kind == "zero1" else 1)
    predicted = {"parameters": kept, "gradients": kept, "optimizer": 2 * state + counts}
    predicted["activations"] = _activations(config, attention, run.micro_batch)
    return predicted, theory.sent_bytes(whole, blocks, passes)


@functools.cache  # most runs have the same micro-batch
def _activations(config: GPT2Config, attention: str, batch_size: int) -> int:
    with torch.device("meta"):
        model = families.build(config, attention=attention)
    found = predict(model, batch_size=batch_size, sequence_length=SEQUENCE_LENGTH)
    return found.terms["activations"]


def _timeline(path: Path) -> dict[str, Any]:
    """Return the last recorded step of one rank, as coarse as it can be drawn; microseconds."""
    found = step_lanes(read_trace(path))[-1].from_begin()
    for lane in LANES:
        parts = merged(found[lane], gap=found["duration_us"] / FINEST)
        found[lane] = [[round(begin, 1), round(end, 1)] for begin, end in parts]
    return found


def conformance(path: Path) -> dict[str, Any] | None:
    """Return chapter by implementation, of the specification's report; None if there is none."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if report.get("schema") != "trainspec-report/1" or not report["complete"]:
        return None
    rows: dict[str, dict[str, Counter[str]]] = {}
    for clause in report["clauses"]:
        if clause["strength"] == "MUST":
            chapter = rows.setdefault(clause["chapter"], {})
            for name, cell in clause["cells"].items():
                chapter.setdefault(name, Counter())[cell["outcome"]] += 1
    return {
        "command": report["run"].get("command", ""),
        "text": report["verdict"]["text"],
        "implementations": [found["name"] for found in report["implementations"]],
        "rows": [{"chapter": chapter, "cells": cells} for chapter, cells in rows.items()],
    }


# -------------------------------------------------------------------------- checks, and the table


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
            problems += _check_restart(run, out)
    return problems


def _check_restart(run: Run, out: Path) -> list[str]:
    """Return problems unless a run that was killed and restarted equals the one that was not."""
    same = next(one for one in RUNS if (one.name, one.kind) == (run.name, run.kind))
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
