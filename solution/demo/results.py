"""OUT/results.json: everything that the page shows, gathered from what the runs left behind.

{
  "schema": "trainspec-demo/1",
  "model": "gpt2 tiny", "parameters": 1088256, "tokens_per_step": 2048, "steps": 30,
  "device": "cpu", "torch": "2.13.0", "seconds": 190.0,
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

What theory predicts of a model of P bytes in W ranks, with M micro-batches per step and B bytes of
P inside blocks:

    kind                  parameters  gradients  AdamW's state   sent per step
    alone                 P           P          2P              nothing
    ddp                   P           P          2P              P: every gradient once
    zero1                 P           P          2P/W            2P: gradients, then new weights
    fsdp_no_shard         P           P          2P              P
    fsdp_shard_grad_op    P/W         P/W        2P/W            MP + P: one gather per micro-batch
    fsdp_full_shard       P/W         P/W        2P/W            M(P + B) + P: blocks gathered again

Gradients are those that the update reads. AdamW also keeps a step count of 4 bytes per tensor.
Bytes are those that a rank hands to its collectives (`solution.measure.traffic`). Activations, of
one micro-batch, are predicted with fake tensors and do not depend on the ranks.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from solution.config import GPT2Config
from solution.demo.runs import GLOBAL_BATCH, RUNS, SEQUENCE_LENGTH, Run
from solution.measure.intervals import merged
from solution.measure.memory import predict
from solution.measure.trace import LANES, step_lanes
from solution.measure.trace_file import TraceError, read_trace
from solution.models import families

FINEST = 1500  # parts of a step: gaps below one such part are not drawn


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
    predicted, sent, reason = _theory(run, config, attention)

    def differences(key: str) -> list[float]:
        pairs = zip(run.curve(out, key), RUNS[0].curve(out, key), strict=True)
        return [abs(a - b) for a, b in pairs]

    return {
        "title": run.title,
        "kind": run.kind,
        "num_ranks": run.num_ranks,
        "losses": run.curve(out, "loss"),
        "differences": differences("loss"),
        "distance": {key: max(differences(key)) for key in ("loss", "grad_norm")},
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
            "reason": reason,
        },
        "timeline": [lanes for path in traces for lanes in _timeline(path)],
        "weights": summaries[0]["weights_sha256"],
    }


def _theory(run: Run, config: GPT2Config, attention: str) -> tuple[dict[str, int], int, str]:
    """Return the bytes per rank by component, those sent per step, and why; see the table above."""
    whole, blocks, num_tensors = _sizes(config)
    passes = GLOBAL_BATCH // (run.micro_batch * run.num_ranks)
    sent, reason = {
        "alone": (0, "nothing: one rank"),
        "ddp": (whole, "P: every gradient once"),
        "zero1": (2 * whole, "2P: every gradient, then every new weight"),
        "fsdp_no_shard": (whole, "P: every gradient once"),
        "fsdp_shard_grad_op": (
            passes * whole + whole,
            "MP + P: a gather per micro-batch, gradients once",
        ),
        "fsdp_full_shard": (
            passes * (whole + blocks) + whole,
            "M(P + B) + P: blocks gathered for forward and backward, gradients once",
        ),
    }[run.kind]
    is_sharded = run.kind in ("fsdp_shard_grad_op", "fsdp_full_shard")
    kept = whole // run.num_ranks if is_sharded else whole
    state = whole // run.num_ranks if is_sharded or run.kind == "zero1" else whole
    counts = 4 * num_tensors // (run.num_ranks if run.kind == "zero1" else 1)
    activations = _activations(config, attention, run.micro_batch)
    sizes = (kept, kept, 2 * state + counts, activations)
    names = ("parameters", "gradients", "optimizer", "activations")
    return dict(zip(names, sizes, strict=True)), sent, reason


def _sizes(config: GPT2Config) -> tuple[int, int, int]:
    """Return the bytes of all parameters and of those inside blocks, and the number of tensors."""
    with torch.device("meta"):
        model = families.build(config)
    tensors, of_blocks = list(model.parameters()), model.blocks.parameters()
    return sum(p.nbytes for p in tensors), sum(p.nbytes for p in of_blocks), len(tensors)


@functools.cache  # most runs have the same micro-batch
def _activations(config: GPT2Config, attention: str, batch_size: int) -> int:
    with torch.device("meta"):
        model = families.build(config, attention=attention)
    found = predict(model, batch_size=batch_size, sequence_length=SEQUENCE_LENGTH)
    return found.terms["activations"]


def _timeline(path: Path) -> list[dict[str, Any]]:
    """Return the last recorded step of one rank, as coarse as it can be drawn; microseconds."""
    try:
        found = step_lanes(read_trace(path))[-1].from_begin()
    except TraceError:
        return []  # the page leaves out what cannot be read
    for lane in LANES:
        parts = merged(found[lane], gap=found["duration_us"] / FINEST)
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
