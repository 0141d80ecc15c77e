"""The runs of the demonstration: commands, the kill, and the files that each leaves behind."""

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
from typing import Any, NamedTuple

GLOBAL_BATCH, MICRO_BATCH, SEQUENCE_LENGTH = 16, 4, 128
PRESET = "tiny"
VICTIM = 1  # the rank that is killed
# Before a rank's command: note which process it is, then become it. torchrun makes $$ of $$$$.
TELL = 'echo $$$$ >> "$0.$RANK"; exec "$@"'


class Division(NamedTuple):
    """How a run sends: of P bytes of parameters, B of them in blocks, M micro-batches a step."""

    script: str  # solution.train_...
    sent_bytes: Callable[[int, int, int], int]  # in a step, of P, B and M
    reason: str


@dataclass(frozen=True)
class Run:
    """One training run of the demo."""

    title: str  # for people
    name: str  # of the files that it writes
    division: Division
    num_ranks: int
    flags: tuple[str, ...] = ()
    folder: str = "runs"  # below the demo's
    is_killed: bool = False  # once, and started anew
    micro_batch: int = MICRO_BATCH

    def command(self, shared: Sequence[str], out: Path) -> list[str]:
        """Return the command line, `torchrun` on a free port of the loopback for several ranks."""
        script = ["-m", f"solution.train_{self.division.script}", *shared, *self.flags]
        script += ["--out", str(out / self.folder), "--micro-batch-size", str(self.micro_batch)]
        if self.num_ranks == 1:
            return [sys.executable, *script]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        torchrun.append(f"--nproc-per-node={self.num_ranks}")
        if self.is_killed:
            torchrun += ["--max-restarts=1", "--no-python", "sh", "-c", TELL]
            torchrun += [str(out / self.folder / "pid"), sys.executable]
        return [*torchrun, *script]

    def starts(self, out: Path) -> list[int]:
        """Return the process ids of the rank that is killed, one per start."""
        return [int(line) for line in (out / self.folder / f"pid.{VICTIM}").read_text().split()]

    def log(self, out: Path) -> Path:
        """Return the file that gets a line per step."""
        return out / self.folder / f"{self.name}.jsonl"

    def curve(self, out: Path, key: str) -> list[float]:
        """Return `key` of each step, from the log."""
        return [json.loads(line)[key] for line in self.log(out).read_text().splitlines()]

    def summaries(self, out: Path) -> list[dict[str, Any]]:
        """Return what each rank wrote at the end."""
        paths = (out / self.folder / f"{self.name}.rank{r}.json" for r in range(self.num_ranks))
        return [json.loads(path.read_text()) for path in paths]


ALONE = Division("baseline", lambda p, b, m: 0, "nothing: one rank")
DDP = Division("ddp", lambda p, b, m: p, "P: every gradient once")
ZERO1 = Division("ddp", lambda p, b, m: 2 * p, "2P: every gradient, then every new weight")
NO_SHARD = DDP._replace(script="fsdp")
GATHERED_ONCE = "MP + P: a gather per micro-batch, gradients once"
GRAD_OP = Division("fsdp", lambda p, b, m: m * p + p, GATHERED_ONCE)
GATHERED_TWICE = "M(P + B) + P: blocks gathered for forward and backward, gradients once"
FULL_SHARD = Division("fsdp", lambda p, b, m: m * (p + b) + p, GATHERED_TWICE)
SMALL_BUCKETS = ("--bucket-size-mb", "1")  # several, of a model of a few MiB
BUCKETED = ("--wrapper", "ddp_bucketed", *SMALL_BUCKETS)
RUNS = [
    Run("one rank", "baseline", ALONE, 1),
    Run("control", "baseline", ALONE, 1, folder="control", micro_batch=MICRO_BATCH // 2),
    Run("ours, ddp", "ddp", DDP, 2, ("--wrapper", "ddp")),
    Run("ours, bucketed", "ddp_bucketed", DDP, 2, BUCKETED),
    Run("PyTorch's DDP", "ddp_torch", DDP, 2, ("--wrapper", "torch", *SMALL_BUCKETS)),
    Run("ours, ZeRO-1", "ddp_bucketed", ZERO1, 2, (*BUCKETED, "--zero1"), "zero1"),
    Run("ours, FSDP", "fsdp_full_shard", FULL_SHARD, 2, ("--strategy", "FULL_SHARD")),
    Run("ours, SHARD_GRAD_OP", "fsdp_shard_grad_op", GRAD_OP, 2, ("--strategy", "SHARD_GRAD_OP")),
    Run("ours, NO_SHARD", "fsdp_no_shard", NO_SHARD, 2, ("--strategy", "NO_SHARD")),
    Run("PyTorch's FSDP", "fsdp_full_shard_torch", FULL_SHARD, 2, ("--impl", "torch")),
    Run("killed, resumed", "ddp_bucketed", DDP, 2, BUCKETED, "killed", is_killed=True),
]
"""The first one is the baseline and the second the control."""


def command(run: Run, flags: argparse.Namespace) -> list[str]:
    """Return the command line of a run, with the flags that all have, as `main` parsed them."""
    folder = flags.out / run.folder
    settings = {  # a run's own flags come later, and win
        "data": flags.out / "data",
        "preset": PRESET,
        "sequence-length": SEQUENCE_LENGTH,
        "global-batch-size": GLOBAL_BATCH,
        "steps": flags.steps,
        "warmup-steps": flags.steps // 10,
        "learning-rate": 1e-3,
        "max-norm": 1.0,
        "log-every": max(1, flags.steps // 3),
        "device": flags.device,
        "attention": flags.attention,
    }
    if run.is_killed:
        settings |= {"checkpoint-dir": folder / "saved", "save-every": max(1, flags.steps // 6)}
    shared = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    return run.command(shared, flags.out)


def train(run: Run, flags: argparse.Namespace) -> None:
    """Train one of the runs, with one thread per rank, and kill it if that is its purpose.

    Raises:
        subprocess.CalledProcessError: it failed, and has said why.
    """
    folder, words = flags.out / run.folder, command(run, flags)
    if run.is_killed:
        shutil.rmtree(folder, ignore_errors=True)  # an earlier demo's saves are of a finished run
        folder.mkdir(parents=True)
    print(f"\n$ {shlex.join(['python', *words[1:]])}", flush=True)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        # Ranks of a second start must not find the addresses of the first: see solution.resume.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    # A rank of its own run, whoever started the demo.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    with subprocess.Popen(words, env=environment) as process:
        if run.is_killed:
            _kill(run, flags.out, max(1, 4 * flags.steps // 7), process)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words)


def _kill(run: Run, out: Path, after: int, process: subprocess.Popen[bytes]) -> None:
    """Kill a rank once `after` steps are in the log."""
    log = run.log(out)
    while not (log.exists() and log.read_bytes().count(b"\n") >= after):
        if process.poll() is not None:
            return  # it failed, and has said why
        time.sleep(0.01)
    pid = run.starts(out)[-1]
    os.kill(pid, signal.SIGKILL)
    print(f"killed rank {VICTIM} (process {pid}) after step {after}", flush=True)
