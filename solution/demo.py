"""The demonstration, `make demo`: GPT-2 learns from real text, in several ways, with equal losses.

1. Shards from the sources of Python's standard library, tokenizer included; reused the second time.
2. One rank: the baseline.
3. One rank with half the micro-batch: the control. It computes the same mean in another order of
   summation, and so measures how far rounding alone drives two right runs apart.
4. Two ranks: our DDP (one reduction per parameter), our bucketed DDP, PyTorch's. Same seed, data
   and global batch.
5. Two ranks, one of which is killed with SIGKILL in the middle: torchrun starts both anew, and they
   go on from the last save.

Then a table, and checks that decide the exit status:
- losses and gradient norms lie within 10 times the control's distance from the baseline (plus 8
  float32 units in the last place, should the control happen to agree bit for bit);
- the ranks of each run end with the same weights, bit for bit;
- the two-rank runs reduce each parameter's bytes once per step, not once per micro-batch;
- the run with the kill has every loss, gradient norm and final weight of the same run without,
  bit for bit.

    python -m solution.demo [--steps 30] [--out outputs/demo] [--device auto] [--attention sdpa]

About a minute and a half on two cores. One thread per rank: two would fight for them.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["main"]

GLOBAL_BATCH, MICRO_BATCH, SEQUENCE_LENGTH = 16, 4, 128
MARGIN = 10.0  # between two right runs that differ in rounding, the control being one such pair
VICTIM = 1  # the rank that is killed
# Before a rank's command: write which process it is, then become it. torchrun makes $$ of $$$$.
TELL = 'echo $$$$ > "$0.$RANK"; exec "$@"'
DATA = ["--vocab-size", "2048", "--max-bytes", "2000000", "--shard-tokens", "200000"]


@dataclass(frozen=True)
class Run:
    """One training run of the demo: what to start, and what it left behind."""

    title: str
    name: str  # of the files it writes
    num_ranks: int
    flags: tuple[str, ...]
    folder: str  # below the demo's
    is_killed: bool = False  # once, and started anew

    def command(self, shared: Sequence[str], out: Path) -> list[str]:
        """The command line, `torchrun` on a free port of the loopback for several ranks."""
        flags = [*shared, *self.flags, "--out", str(out / self.folder)]
        if self.num_ranks == 1:
            return [sys.executable, "-m", "solution.train_baseline", *flags]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        torchrun.append(f"--nproc-per-node={self.num_ranks}")
        if not self.is_killed:
            return [*torchrun, "-m", "solution.train_ddp", *flags]
        tell = ["--max-restarts=1", "--no-python", "sh", "-c", TELL, str(out / self.folder / "pid")]
        return [*torchrun, *tell, sys.executable, "-m", "solution.train_ddp", *flags]

    def pid(self, out: Path) -> str:
        """Which process the rank to be killed is, of the newest start."""
        return (out / self.folder / f"pid.{VICTIM}").read_text().strip()

    def curve(self, out: Path, key: str = "loss") -> list[float]:
        """`key` of each step."""
        lines = (out / self.folder / f"{self.name}.jsonl").read_text().splitlines()
        return [json.loads(line)[key] for line in lines]

    def summaries(self, out: Path) -> list[dict[str, Any]]:
        """What each rank said at the end."""
        paths = (out / self.folder / f"{self.name}.rank{r}.json" for r in range(self.num_ranks))
        return [json.loads(path.read_text()) for path in paths]


RUNS = [
    Run("one rank", "baseline", 1, (), "runs"),
    Run("control", "baseline", 1, ("--micro-batch-size", str(MICRO_BATCH // 2)), "control"),
    Run("ours, ddp", "ddp", 2, ("--wrapper", "ddp"), "runs"),
    Run("ours, bucketed", "ddp_bucketed", 2, ("--wrapper", "ddp_bucketed"), "runs"),
    Run("PyTorch's DDP", "torch", 2, ("--wrapper", "torch"), "runs"),
    Run("killed, resumed", "ddp_bucketed", 2, ("--wrapper", "ddp_bucketed"), "killed", True),
]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns 0 if every check holds, 1 if not, 2 if a run failed."""
    parser = argparse.ArgumentParser(
        prog="python -m solution.demo", description="Train in several ways.", allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps of each run")
    parser.add_argument("--out", type=Path, default=Path("outputs/demo"), help="folder to fill")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--attention", default="sdpa", help="who computes it, in all runs alike")
    flags = parser.parse_args(arguments)
    if flags.steps < 2:
        parser.error(f"expected --steps >= 2 to see a loss fall, got {flags.steps}")
    started = time.perf_counter()
    data = flags.out / "data"
    if status := _start([sys.executable, "-m", "solution.data.prepare", "--out", str(data), *DATA]):
        return status
    for run in RUNS:
        if status := _train(run, _shared_flags(flags, data), flags):
            return status
    print("\n" + _table(flags.out))
    problems = _check(flags.out)
    print("\n".join(problems) or "all checks hold", f"({time.perf_counter() - started:.0f} s)")
    return 1 if problems else 0


def _shared_flags(flags: argparse.Namespace, data: Path) -> list[str]:
    """What all runs have in common; a run's own flags come later, and win."""
    settings = {
        "data": data,
        "preset": "tiny",
        "sequence-length": SEQUENCE_LENGTH,
        "global-batch-size": GLOBAL_BATCH,
        "micro-batch-size": MICRO_BATCH,
        "steps": flags.steps,
        "warmup-steps": flags.steps // 10,
        "learning-rate": 1e-3,
        "max-norm": 1.0,
        "bucket-size-mb": 1,
        "log-every": max(1, flags.steps // 3),
        "device": flags.device,
        "attention": flags.attention,
    }
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


def _train(run: Run, shared: Sequence[str], flags: argparse.Namespace) -> int:
    """One of the runs, with the kill if that is what it is for."""
    folder = flags.out / run.folder
    meanwhile = None
    if run.is_killed:
        shutil.rmtree(folder, ignore_errors=True)  # an earlier demo's saves are of a finished run
        folder.mkdir(parents=True)
        every = str(max(1, flags.steps // 6))
        shared = [*shared, "--checkpoint-dir", str(folder / "saved"), "--save-every", every]

        def meanwhile(process: subprocess.Popen[bytes]) -> None:
            _kill(run, flags.out, max(1, 4 * flags.steps // 7), process)

    command = run.command(shared, flags.out)
    print(f"\n$ {shlex.join(['python', *command[1:]])}", flush=True)
    return _start(command, meanwhile)


def _start(
    command: Sequence[str], meanwhile: Callable[[subprocess.Popen[bytes]], None] | None = None
) -> int:
    """Run `command` to its end with one thread per rank; 2 if it failed, having said why."""
    # Ranks of a second start must not find the addresses of the first: see solution.resume.
    settings = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment = {**os.environ, **settings}
    # A rank of its own run, whoever started the demo.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    with subprocess.Popen(command, env=environment) as process:
        if meanwhile is not None:
            meanwhile(process)
    if process.returncode:
        said = f"expected status 0, got {process.returncode} from: {shlex.join(command)}"
        print(f"error: {said}", file=sys.stderr)
        return 2
    return 0


def _kill(run: Run, out: Path, after: int, process: subprocess.Popen[bytes]) -> None:
    """Kill a rank once `after` steps are in the log; leaves word which process that was."""
    log = out / run.folder / f"{run.name}.jsonl"
    while not (log.exists() and log.read_bytes().count(b"\n") >= after):
        if process.poll() is not None:
            return  # it failed, and has said why
        time.sleep(0.01)
    pid = run.pid(out)
    os.kill(int(pid), signal.SIGKILL)
    (out / run.folder / "killed").write_text(pid)
    print(f"killed rank {VICTIM} (process {pid}) after step {after}", flush=True)


# --- the table


def _table(out: Path) -> str:
    """Loss curves side by side, then what each run cost."""
    curves = [run.curve(out) for run in RUNS]
    steps = len(curves[0])
    shown = sorted({1, *range(5, steps + 1, 5), steps})
    rows = [["", *(run.title for run in RUNS)]]
    rows += [[f"loss, step {s}", *(f"{curve[s - 1]:.6f}" for curve in curves)] for s in shown]
    for key, title in (("loss", "losses differ by"), ("grad_norm", "gradient norms by")):
        distances = [_distance(run, RUNS[0], out, key) for run in RUNS]
        rows += [[title, *(f"{distance:.1e}" for distance in distances)]]
    firsts = [run.summaries(out) for run in RUNS]
    rows += [
        ["tokens/s, all ranks", *(f"{s[0]['tokens_per_s']:,.0f}" for s in firsts)],
        ["reductions per step", *(str(s[0]["reductions_per_step"]) for s in firsts)],
        ["bytes per step", *(f"{s[0]['bytes_per_step']:,}" for s in firsts)],
        ["peak MiB per rank", *(_peaks(s) for s in firsts)],
        ["final weights", *(s[0]["weights_sha256"][:8] for s in firsts)],
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    control = firsts[-1][0]
    note = (
        f"reductions of gradients; besides, {control['control_messages_per_step']} messages of "
        f"{control['control_bytes_per_step']} bytes a step carry counts and losses"
    )
    return "\n".join([*lines, note])


def _peaks(summaries: list[dict[str, Any]]) -> str:
    return " ".join(f"{summary['peak_memory_bytes'] / 2**20:,.0f}" for summary in summaries)


def _distance(run: Run, other: Run, out: Path, key: str) -> float:
    """The largest difference between two curves, over all steps."""
    pairs = zip(run.curve(out, key), other.curve(out, key), strict=True)
    return max(abs(a - b) for a, b in pairs)


# --- the checks


def _check(out: Path) -> list[str]:
    """What does not hold, one line each; says what the bounds were."""
    baseline, control, *others = RUNS
    problems = []
    # Adam and clipping hide a gradient of the wrong size from the loss, but not from its own norm.
    for key, title in (("loss", "losses"), ("grad_norm", "gradient norms")):
        noise = _distance(control, baseline, out, key)
        rounding = 8 * torch.finfo(torch.float32).eps * max(baseline.curve(out, key))
        bound = MARGIN * noise + rounding
        largest = max(_distance(run, baseline, out, key) for run in others)
        said = f"{title}: at most {largest:.1e} from one rank; allowed {bound:.1e}"
        print(f"{said} ({MARGIN:.0f} x control + 8 ulp)")
        if not largest <= bound:
            problems.append(f"FAILED: expected equal curves of {said}")
    losses = baseline.curve(out)
    if not losses[-1] < losses[0]:
        problems.append(f"FAILED: expected the loss to fall, got {losses[0]} to {losses[-1]}")
    for run in others:
        problems += _check_ranks(run, run.summaries(out))
        if run.is_killed:
            [same] = [other for other in others if other.name == run.name and other is not run]
            problems += _check_restart(run, same, out)
    return problems


def _check_restart(run: Run, same: Run, out: Path) -> list[str]:
    """Whether a run that was killed and restarted equals one that was not."""
    if (out / run.folder / "killed").read_text() == run.pid(out):
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


def _check_ranks(run: Run, summaries: list[dict[str, Any]]) -> list[str]:
    problems = []
    weights = {summary["weights_sha256"] for summary in summaries}
    if len(weights) != 1:
        problems.append(f"FAILED: {run.title}: expected equal weights on all ranks, got {weights}")
    for summary in summaries:
        sent, once = summary["bytes_per_step"], summary["parameter_bytes"]
        if sent != once:
            problems.append(
                f"FAILED: {run.title}, rank {summary['rank']}: expected {once} bytes of gradients "
                f"per step, each parameter's once, got {sent} ({sent / once:.2f} x)"
            )
    return problems


if __name__ == "__main__":
    sys.exit(main())
