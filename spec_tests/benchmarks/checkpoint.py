"""Time to save a checkpoint, beside a bare torch.distributed.checkpoint save of the same tensors.

Two ranks hold the same model after two AdamW steps: weights and two moments per parameter, fp32.
Arms, all in the same ranks, each save into a fresh folder that is removed outside of the clock:

    bare           dcp.save of model and optimizer tensors, nested by name, with its defaults
    bare again     once more: the A/A arm (see paired.py)
    NAME           save_checkpoint of each --impl: generators, loader, markers, renames besides
    NAME blocks    for how long its AsyncCheckpointer.save blocks, where it offers one
    NAME load      load_checkpoint of what it saved

Writing is flushed to disk in all arms, so the disk decides: `--folder /dev/shm` leaves it out and
shows the code. Bound: a save at most 1.25 times a bare one, as it does what a bare one does and
then reads back which files there are, writes two small ones and flushes two folders.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import checkpoint as dcp

from spec_tests.benchmarks import paired
from spec_tests.rig.rank import Context
from spec_tests.rig.world import Worlds
from spec_tests.target import load, parse

RESULTS = Path(__file__).with_name("results")
BARE, AGAIN = "bare", "bare again"
BOUND = 1.25


class Arm:
    """One way to save; `undo` removes what it wrote, outside of the clock."""

    def __init__(self, label: str, act: Callable[[str], Any], undo: Callable[[], Any]) -> None:
        self.label, self.act, self.undo = label, act, undo


def body(
    ctx: Context, width: int, impls: list[str], num_rounds: int, folder: str
) -> dict[str, Any]:
    """Rank body: all arms, all rounds; this rank's seconds and the machine's."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(8)])
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(1, width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with contextlib.ExitStack() as stack:
        arms = [_bare(BARE, model, optimizer)]
        for name in impls:
            arms += _of_implementation(name, model, optimizer, folder, stack)
        arms.append(_bare(AGAIN, model, optimizer))
        for arm in arms:
            _once(ctx, arm, folder)
        rounds = [_round(ctx, arms, index, folder) for index in range(num_rounds)]
    tensors = [*model.parameters(), *(t for s in optimizer.state.values() for t in s.values())]
    return {
        "labels": [arm.label for arm in arms],
        "bytes": sum(t.numel() * t.element_size() for t in tensors),
        "rounds": rounds,
    }


def _bare(label: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Arm:
    state = {name: dict(optimizer.state[p]) for name, p in model.named_parameters()}
    tensors = {"model": model.state_dict(), "optimizer": {"state": state}}
    return Arm(label, lambda place: dcp.save(tensors, checkpoint_id=place), lambda: None)


def _of_implementation(
    name: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    folder: str,
    stack: contextlib.ExitStack,
) -> list[Arm]:
    impl = load(parse(name))
    parts = {"model": model, "optimizer": optimizer}
    kept = f"{folder}/{name}-kept"
    impl.save_checkpoint(kept, step=1, **parts)
    arms = [
        Arm(name, lambda place: impl.save_checkpoint(place, step=1, **parts), lambda: None),
        Arm(f"{name} load", lambda place: impl.load_checkpoint(kept, **parts), lambda: None),
    ]
    background = getattr(impl.namespace, "AsyncCheckpointer", None)
    if background is not None:
        saver = stack.enter_context(background(f"{folder}/{name}-background", keep=1))
        steps = iter(range(10**9))
        arms.append(
            Arm(f"{name} blocks", lambda place: saver.save(step=next(steps), **parts), saver.wait)
        )
    return arms


def _once(ctx: Context, arm: Arm, folder: str) -> float:
    place = f"{folder}/saved"
    ctx.barrier()
    start = time.perf_counter()
    arm.act(place)
    seconds = time.perf_counter() - start
    arm.undo()
    ctx.barrier()
    if ctx.rank == 0:
        shutil.rmtree(place, ignore_errors=True)
    return seconds


def _round(ctx: Context, arms: list[Arm], index: int, folder: str) -> dict[str, Any]:
    seconds = [0.0] * len(arms)
    ctx.barrier()
    began, busy, own = time.perf_counter(), paired.busy_s(), time.process_time()
    for number in paired.order(len(arms), index):
        seconds[number] = _once(ctx, arms[number], folder)
    now = paired.busy_s()
    return {
        "seconds": seconds,
        "elapsed": time.perf_counter() - began,
        "own": time.process_time() - own,
        "busy": None if busy is None or now is None else now - busy,
    }


def summarise(ranks: list[dict[str, Any]], max_others: float) -> dict[str, Any]:
    """Medians, ratios to the bare save, and the verdict."""
    labels = ranks[0]["labels"]
    times: dict[str, list[float]] = {label: [] for label in labels}
    for of_ranks in zip(*(rank["rounds"] for rank in ranks), strict=True):
        own = sum(part["own"] for part in of_ranks)
        first = of_ranks[0]
        if paired.share_of_others(first["busy"], own, first["elapsed"]) > max_others:
            continue
        for number, label in enumerate(labels):
            times[label].append(max(part["seconds"][number] for part in of_ranks))
    num_kept = len(times[BARE])
    if num_kept < paired.FEWEST_ROUNDS:
        raise SystemExit(
            f"{num_kept} of {len(ranks[0]['rounds'])} rounds were quiet enough, expected at least "
            f"{paired.FEWEST_ROUNDS}; let nothing else run, or give more --rounds"
        )
    ratios = {label: paired.ratio(times[label], times[BARE]) for label in labels if label != BARE}
    return {
        "bytes": ranks[0]["bytes"],
        "num_kept": num_kept,
        "ms": {label: 1e3 * statistics.median(times[label]) for label in labels},
        "ratios": ratios,
        "verdicts": _verdicts(ratios),
    }


def _verdicts(ratios: dict[str, paired.Ratio]) -> list[str]:
    if paired.is_void(ratios[AGAIN]):
        low, high = paired.AA_RANGE
        return [f"void: bare against itself {ratios[AGAIN]}, expected within {low}-{high}"]
    return [
        f"{'holds' if found.high <= BOUND else 'missed'}: {label} against bare at most "
        f"{found.high:.3f}, bound {BOUND}"
        for label, found in ratios.items()
        if label != AGAIN and not label.endswith((" load", " blocks"))
    ]


def render(result: dict[str, Any], environment: dict[str, str], folder: str) -> str:
    """The result as Markdown."""
    lines = ["# Saving a checkpoint, paired against a bare torch.distributed.checkpoint save", ""]
    lines += [f"- {key}: {value}" for key, value in environment.items()]
    lines.append(
        f"- 2 ranks on gloo, 1 thread each, {result['bytes'] / 2**20:.0f} MiB of weights and "
        f"moments, below {folder}; ratios are paired medians with their 95 % interval"
    )
    rows = [("arm", "ms", "against bare")]
    for label, ms in result["ms"].items():
        rows.append((label, f"{ms:.1f}", str(result["ratios"].get(label, "1"))))
    lines += ["", paired.table(rows), "", f"{result['num_kept']} rounds kept."]
    return "\n".join([*lines, "", *[f"- {verdict}" for verdict in result["verdicts"]]]) + "\n"


def main(argv: list[str]) -> int:
    """Measure, print, and write `checkpoint.md` and `checkpoint.json`."""
    parser = argparse.ArgumentParser(prog="python -m spec_tests.benchmarks checkpoint")
    parser.add_argument("--impl", action="append", help="as for the suite; default: solution")
    parser.add_argument("--width", type=int, default=1024, help="of 8 layers; default 1024, 96 MiB")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--folder", help="where to save; default: the system's temporary folder")
    parser.add_argument(
        "--max-others", type=float, default=paired.MAX_OTHERS, help="part of the cores"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(argv)
    worlds = Worlds()
    try:
        with tempfile.TemporaryDirectory(prefix="trainspec-", dir=options.folder) as folder:
            ranks = worlds.world(2).run(
                body,
                options.width,
                options.impl or ["solution"],
                options.rounds,
                folder,
                timeout_s=3600.0,
                grace_s=60.0,
            )
    finally:
        worlds.close()
    result, environment = summarise(list(ranks), options.max_others), paired.environment()
    text = render(result, environment, options.folder or tempfile.gettempdir())
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "checkpoint.md").write_text(text)
    result["ratios"] = {label: vars(ratio) for label, ratio in result["ratios"].items()}
    record = {"environment": environment, "result": result}
    (options.out / "checkpoint.json").write_text(json.dumps(record, indent=1) + "\n")
    return int(any(not verdict.startswith("holds") for verdict in result["verdicts"]))
