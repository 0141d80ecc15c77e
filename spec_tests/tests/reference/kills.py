"""`python -m spec_tests kills [--runs 50] [--seed 0]`: kill ranks, compare with no kill.

Each run is two ranks under `torchrun --max-restarts=1` that train for 40 steps and save after every
third. One rank, drawn at random, is killed with SIGKILL at a
random moment: while it starts, between steps, inside a step, during a save. torchrun starts both
ranks anew, and they go on from the newest save. Held against a run that nobody disturbed:

- the final weights of every rank, bit for bit;
- the log: every step once, with the same loss, norm, rate and number of tokens, bit for bit, so
  that no token was lost, repeated or seen in another place;
- the saves: at the kill and at the end, whatever has a checkpoint's name is complete, and no
  restart passed one over as damaged;
- that there was a restart at all, and that no process is left.

Exit status 1 if any of that fails. About 7 s per run on two quiet cores; needs Linux.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_tests.rig.ranks.zygote import start_zygote
from spec_tests.tests.reference.launch import Started, torchrun
from spec_tests.tests.reference.training import (
    DDP,
    SMALL,
    after_steps,
    steps,
    summary,
    write_shards,
)

STEPS, SAVE_EVERY, NUM_RANKS = 40, 3, 2
FLAGS = (
    *(*SMALL, "--steps", STEPS, "--save-every", SAVE_EVERY),
    *("--data", "../data", "--out", ".", "--checkpoint-dir", "saved"),
)
NAME = "ddp_bucketed"
DECISIVE = ("step", "loss", "lr", "grad_norm", "tokens")
"""What a log line says about the step and not about the machine."""


@dataclass(frozen=True)
class Kill:
    """Rank `rank` dies at `moment`, in steps: at 12.5 half of the thirteenth; below 0 it starts."""

    rank: int
    moment: float


@dataclass(frozen=True)
class Whole:
    """What a run that nobody disturbed left behind, and its pace, by which moments are drawn."""

    weights: str
    log: list[tuple[Any, ...]]
    start_s: float = 0.0
    step_s: float = 0.0


def plan(count: int, seed: int) -> list[Kill]:
    """`count` kills: the run is cut into as many equal parts, a moment is drawn in each."""
    draw = random.Random(seed)
    moments = [draw.uniform(i, i + 1) / count * (STEPS + 1) - 1 for i in range(count)]
    draw.shuffle(moments)
    return [Kill(draw.randrange(NUM_RANKS), moment) for moment in moments]


def undisturbed(folder: Path) -> Whole:
    """Return the run with which the others are compared."""
    folder.mkdir()
    begun = time.perf_counter()
    with _agent(folder, max_restarts=0) as agent:
        after_steps(agent, folder, 1, NAME)
        first_s = time.perf_counter() - begun
        after_steps(agent, folder, STEPS, NAME)
        all_s = time.perf_counter() - begun
        ended = agent.wait()
    if ended.status:
        raise RuntimeError(f"expected the undisturbed run to end well, got {ended}")
    return left_behind(folder, first_s, (all_s - first_s) / (STEPS - 1))


def left_behind(folder: Path, *pace: float) -> Whole:
    """Return the result of a finished run."""
    [weights] = {_weights(folder, rank) for rank in range(NUM_RANKS)}
    return Whole(weights, _log(folder), *pace)


def disturb(kill: Kill, whole: Whole, folder: Path) -> list[str]:
    """Train, kill, let torchrun restart; return what is wrong with what is left."""
    folder.mkdir()
    saved = folder / "saved"
    with _agent(folder, max_restarts=1) as agent:
        pid = _kill(agent, kill, whole, folder)
        complaints = torn(saved)
        try:
            agent.wait_until(lambda: agent.ranks().get(kill.rank, pid) != pid, "a restart")
        except TimeoutError as error:
            complaints.append(str(error))
        ended = agent.wait()
        complaints += [f"process {pid} was left" for pid in agent.close()]
    if ended.status:
        complaints.append(f"expected torchrun's status 0, got {ended.status}: {ended.err[-2000:]}")
    else:
        complaints += differences(whole, folder)
    complaints += torn(saved, is_over=True)
    if "skipped this checkpoint" in ended.err:
        complaints.append("a restart passed over a damaged save")
    return complaints


def _agent(folder: Path, *, max_restarts: int) -> Any:
    options = ("--standalone", f"--nproc-per-node={NUM_RANKS}", f"--max-restarts={max_restarts}")
    return torchrun(options, DDP, FLAGS, folder=folder)


def _kill(agent: Started, kill: Kill, pace: Whole, folder: Path) -> int:
    """Wait for the moment, kill the rank; returns the process that it was."""
    pids = agent.ranks_when_started(NUM_RANKS)
    if kill.moment < 0:
        time.sleep((1 + kill.moment) * pace.start_s)
    else:
        after_steps(agent, folder, int(kill.moment), NAME)
        time.sleep(kill.moment % 1 * pace.step_s)
    os.kill(pids[kill.rank], signal.SIGKILL)
    return pids[kill.rank]


# --- what the files say


def _log(folder: Path) -> list[tuple[Any, ...]]:
    return [tuple(line[key] for key in DECISIVE) for line in steps(folder, NAME)]


def _weights(folder: Path, rank: int) -> str:
    is_there = (folder / f"{NAME}.rank{rank}.json").exists()
    return summary(folder, f"{NAME}.rank{rank}")["weights_sha256"] if is_there else "no summary"


def torn(saved: Path, *, is_over: bool = False) -> list[str]:
    """What bears a checkpoint's name and is not complete; at the end, also what is left over."""
    problems = []
    for path in sorted(saved.iterdir()) if saved.is_dir() else ():
        if path.name.startswith("."):
            problems += [f"{path.name}: left over"] if is_over else []
            continue
        marker = path / "complete.json"
        files = json.loads(marker.read_text())["files"] if marker.exists() else {"a marker": 0}
        sizes = {
            name: (path / name).stat().st_size if (path / name).is_file() else None
            for name in files
        }
        if sizes != files:
            problems.append(f"torn checkpoint {path.name}: expected {files}, got {sizes}")
    return problems


def differences(whole: Whole, folder: Path) -> list[str]:
    """How this run's result differs from that of the undisturbed one."""
    problems = []
    for rank in range(NUM_RANKS):
        weights = _weights(folder, rank)
        if weights != whole.weights:
            problems.append(f"rank {rank}: expected weights {whole.weights[:8]}, got {weights[:8]}")
    log = _log(folder)
    for expected, found in zip(whole.log, log, strict=False):
        if found != expected:
            problems.append(f"expected the step {DECISIVE} = {expected}, got {found}")
            break
    if len(log) != len(whole.log):
        problems.append(f"expected {len(whole.log)} steps in the log, got {len(log)}")
    return problems


# --- the command


def main(arguments: Sequence[str]) -> int:
    """The command; 0 if no kill made a difference."""
    parser = argparse.ArgumentParser(prog="python -m spec_tests kills")
    parser.add_argument("--runs", type=int, default=50, help="how many, with one kill each")
    parser.add_argument("--seed", type=int, default=0, help="of ranks and moments")
    options = parser.parse_args(arguments)
    start_zygote()
    begun, wrong = time.perf_counter(), []
    with tempfile.TemporaryDirectory(prefix="trainspec-") as folder:
        place = Path(folder)
        write_shards(place / "data", 3000)
        whole = undisturbed(place / "whole")
        for number, kill in enumerate(plan(options.runs, options.seed)):
            complaints = disturb(kill, whole, place / f"run{number}")
            said = f"rank {kill.rank} at {kill.moment:.2f}: {'; '.join(complaints) or 'equal'}"
            sys.stderr.write(f"{number + 1}/{options.runs} {said}\n")
            wrong += [said] if complaints else []
            shutil.rmtree(place / f"run{number}")
    took = time.perf_counter() - begun
    end = (
        f"{options.runs - len(wrong)} of {options.runs} runs ended with the weights "
        f"{whole.weights[:8]} and the log of the undisturbed run ({STEPS} steps, "
        f"{sum(line[-1] for line in whole.log):,} tokens); {took:.0f} s"
    )
    sys.stdout.write("\n".join([*wrong, end]) + "\n")
    return 1 if wrong else 0
