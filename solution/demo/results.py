"""OUT/results.json: everything that the page shows, gathered from what the runs left behind.

A run's `Division` predicts the bytes that a rank hands to its collectives in a step;
`solution.measure.traffic` has counted them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from solution.config import GPT2Config
from solution.data.prepare import vocabulary_of
from solution.demo.runs import GLOBAL_BATCH, PRESET, RUNS, SEQUENCE_LENGTH, Run
from solution.models import families

MARGIN = 10.0  # between two right runs that differ in rounding, the control being one such pair


def gather(out: Path) -> dict[str, Any]:
    """Return all of it but the checks and the seconds."""
    config = GPT2Config.preset(PRESET, vocab_size=vocabulary_of(out / "data"))
    with torch.device("meta"):
        blocks = families.build(config).blocks
    of_blocks = sum(parameter.nbytes for parameter in blocks.parameters())
    first = RUNS[0].summaries(out)[0]
    return {
        "schema": "trainspec-demo/1",
        "model": f"{first['config']['model']} {first['config']['preset']}",
        "parameters": first["parameter_bytes"] // 4,
        "tokens_per_step": GLOBAL_BATCH * SEQUENCE_LENGTH,
        "steps": first["steps"],
        "device": first["device"],
        "torch": torch.__version__,
        "runs": [_gather_run(run, of_blocks, out) for run in RUNS],
    }


def _gather_run(run: Run, of_blocks: int, out: Path) -> dict[str, Any]:
    """Return one run; `of_blocks` are the bytes of the blocks' parameters."""
    summaries, division = run.summaries(out), run.division
    passes = GLOBAL_BATCH // (run.micro_batch * run.num_ranks)

    def differences(key: str) -> list[float]:
        pairs = zip(run.curve(out, key), RUNS[0].curve(out, key), strict=True)
        return [abs(a - b) for a, b in pairs]

    return {
        "title": run.title,
        "losses": run.curve(out, "loss"),
        "differences": differences("loss"),  # from the first run, per step
        "distance": {key: max(differences(key)) for key in ("loss", "grad_norm")},  # the largest
        "tokens_per_s": summaries[0]["tokens_per_s"],
        "held": summaries[0]["held_bytes"],
        "peak": [summary["peak_memory_bytes"] for summary in summaries],
        "traffic": {
            "collectives": summaries[0]["collectives"],
            "bytes": summaries[0]["bytes_per_step"],
            "theory_bytes": division.sent_bytes(summaries[0]["parameter_bytes"], of_blocks, passes),
            "reason": division.reason,
        },
        "weights": summaries[0]["weights_sha256"],
    }


def check(runs: Sequence[Mapping[str, Any]], out: Path) -> list[str]:
    """Return what does not hold, one line each."""
    baseline, control, *others = runs
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
    begun, *_, ended = baseline["losses"]
    if not ended < begun:
        problems.append(f"FAILED: expected the loss to fall, got {begun} to {ended}")
    for run, gathered in zip(RUNS[2:], others, strict=True):
        summaries, expected = run.summaries(out), gathered["traffic"]["theory_bytes"]
        weights = {summary["weights_sha256"] for summary in summaries}
        if len(weights) != 1:
            said = f"expected equal weights on all ranks, got {weights}"
            problems.append(f"FAILED: {run.title}: {said}")
        problems += [
            f"FAILED: {run.title}, rank {summary['rank']}: expected {expected} bytes per step, as "
            f"its algorithm needs, got {summary['bytes_per_step']} "
            f"({summary['bytes_per_step'] / max(expected, 1):.2f} x)"
            for summary in summaries
            if summary["bytes_per_step"] != expected
        ]
        if run.is_killed:
            problems += _check_restart(run, weights, out)
    return problems


def _check_restart(run: Run, weights: set[str], out: Path) -> list[str]:
    """Return problems unless a run that was killed and restarted equals the one that was not."""
    if len(run.starts(out)) < 2:
        return [f"FAILED: {run.title}: expected another process after the kill, got the same"]
    same = next(one for one in RUNS if (one.name, one.division) == (run.name, run.division))
    curves = ("loss", "grad_norm", "lr")
    differing = [key for key in curves if run.curve(out, key) != same.curve(out, key)]
    weights = weights | {summary["weights_sha256"] for summary in same.summaries(out)}
    if differing or len(weights) != 1:
        said = f"{', '.join(differing) or 'no curve'} differ, weights {weights}"
        return [f"FAILED: {run.title}: expected the bits of {same.title}, got: {said}"]
    print(f"{run.title}: every loss, norm and weight equal to those of {same.title}, bit for bit")
    return []
