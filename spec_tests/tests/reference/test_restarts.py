"""Runs that stop and go on end with the same weights: one rank, torchrun's ranks, two nodes.

The commands for several nodes are taken from `solution/README.md` and run.
"""

import os
import random
import re
import shlex
import signal
import subprocess
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.run import get_args_parser

from spec_tests.tests.reference.launch import (
    HAS_PROC,
    ROOT,
    free_port,
    on_ranks,
    run,
    run_ranks,
    solution,
    start,
    torchrun,
)
from spec_tests.tests.reference.training import (
    BASELINE,
    DDP,
    SMALL,
    after_steps,
    num_steps,
    steps,
    summary,
    trained,
    weights,
    write_shards,
)

STEPS = ("--steps", 20, "--save-every", 1)
INTERRUPTED = 4


def flags(data, folder, *more):
    return (*SMALL, *STEPS, "--data", data, "--out", folder, "--checkpoint-dir", "saved", *more)


def test_one_rank_stops_when_told_to_goes_on_to_the_same_weights_and_stays_done(data, tmp_path):
    """The same after SIGKILL: the test with torchrun."""
    (tmp_path / "unstopped").mkdir()
    trained(data, tmp_path / "unstopped", *STEPS)
    arguments = flags(data, tmp_path, "--keep", 2)
    started = start(BASELINE, arguments, folder=tmp_path)
    after_steps(started, tmp_path, 3)
    os.kill(started.pid, signal.SIGTERM)
    started.wait().require(INTERRUPTED, "told to stop; saved after step")

    again = run(BASELINE, *arguments, folder=tmp_path)
    assert "going on after step" in again.out
    whole = summary(tmp_path / "unstopped")
    assert summary(tmp_path)["weights_sha256"] == whole["weights_sha256"]
    assert [line["step"] for line in steps(tmp_path)] == list(range(1, 21))
    kept = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert kept == ["step-00000019", "step-00000020"]

    assert "going on after step 20" in run(BASELINE, *arguments, folder=tmp_path).out
    other, says = flags(data, tmp_path, "--learning-rate", 1), "learning_rate 1.0 (saved: 0.0003)"
    run(BASELINE, *other, folder=tmp_path, status=1, says=says)


# ---------------------------------------------------------------------------------- torchrun

NUM_STEPS, SAVE_EVERY = 40, 3
FLAGS = (
    *(*SMALL, "--steps", NUM_STEPS, "--save-every", SAVE_EVERY),
    *("--data", "../data", "--out", ".", "--checkpoint-dir", "saved"),
)
NAME = "ddp_bucketed"
DECISIVE = ("step", "loss", "lr", "grad_norm", "tokens")
"""What a log line says about the step and not about the machine."""
LATER = 4
"""Steps after which a run is disturbed: a save is there, and nearly all of the run is to come."""

with_proc = pytest.mark.skipif(not HAS_PROC, reason="finds the ranks of an agent under /proc")


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A folder with data; each run gets one below it."""
    folder = tmp_path_factory.mktemp("restarts")
    write_shards(folder / "data", 3000)
    return folder


@pytest.fixture(scope="session")
def whole(place):
    """What two ranks leave behind that nobody disturbs, and no agent has started."""
    folder = place / "whole"
    folder.mkdir()
    run_ranks(DDP, *FLAGS, folder=folder)
    return left_behind(folder)


def left_behind(folder):
    """Return the weights of both ranks, the log, and what is there of saves that did not end."""
    log = [tuple(line[key] for key in DECISIVE) for line in steps(folder, NAME)]
    return weights(folder, NAME), log, [path.name for path in (folder / "saved").glob(".*")]


def starts(*ended):
    """How often one of these commands said where it begins."""
    return sum(one.out.count("  checkpoints: ") for one in ended)


def page(first_words):
    """The fenced block of the page on many nodes that begins so."""
    text = (ROOT / "solution" / "README.md").read_text()
    [found] = re.findall(rf"```sh\n({re.escape(first_words)}.*?)```", text, flags=re.DOTALL)
    return found


def on_many_nodes():
    """The command of that page, in words."""
    return shlex.split(page("export").partition("\n")[2].replace("\\\n", " "))


def node(folder, port, number):
    """One of two machines with a rank each, whose agents meet at a port."""
    command, *options = on_many_nodes()
    assert command == "torchrun"
    options = [
        *options[: options.index("-m")],
        *("--nproc-per-node=1", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"),
    ]
    return torchrun(options, DDP, FLAGS, folder=folder, name=f"node{number}")


@with_proc
def test_two_nodes_killed_then_told_to_stop_end_with_the_same_bits(place, whole):
    folder, port = place / "nodes", free_port()
    folder.mkdir()

    with node(folder, port, 0) as first, node(folder, port, 1) as second:
        nodes = first, second
        ranks = [agent.ranks_when_started(1) for agent in nodes]
        after_steps(first, folder, LATER, NAME)
        [killed] = ranks[1].values()
        os.kill(killed, signal.SIGKILL)
        second.wait_until(lambda: killed not in second.ranks().values(), "a restart")
        after_steps(first, folder, num_steps(folder, NAME) + 2, NAME)
        for agent in nodes:
            os.kill(agent.pid, signal.SIGTERM)
        stopped = [agent.wait() for agent in nodes]
        left = [pid for agent in nodes for pid in agent.close()]
    again = run_ranks(DDP, *FLAGS, folder=folder)

    assert sorted(rank for found in ranks for rank in found) == [0, 1], "a rank on each node"
    assert left == [], "torchrun ended before its ranks did"
    assert starts(*stopped) == 2, "both nodes began anew, once"
    assert ["told to stop; saved after step" in each.err for each in stopped] == [True, True]
    assert "going on after step" in again[0].out
    assert "skipped this checkpoint" not in again[0].err
    assert left_behind(folder) == whole


def killed(folder, rank, moment):
    """Kill a rank at a moment, in steps (below 0 it starts), and let torchrun start both anew."""
    folder.mkdir()
    options = ("--standalone", "--nproc-per-node=2", "--max-restarts=1")
    with torchrun(options, DDP, FLAGS, folder=folder) as agent:
        pid = agent.ranks_when_started(2)[rank]
        after_steps(agent, folder, max(0, int(moment)), NAME)
        time.sleep(moment % 1 * (0.02 if moment > 0 else 2.0))
        os.kill(pid, signal.SIGKILL)
        agent.wait_until(lambda: agent.ranks().get(rank, pid) != pid, "a restart")
        return agent.wait().require(0), agent.close()


@with_proc
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_kills_at_random_moments_change_no_bit(place, whole):
    """While a rank starts, between steps, inside of one, in a save."""
    draw = random.Random(0)
    for number in range(50):
        rank, moment = draw.randrange(2), draw.uniform(-1, NUM_STEPS)
        folder = place / f"kill{number}-of-rank{rank}-at-step{moment:.2f}"
        ended, left = killed(folder, rank, moment)
        assert left == [], folder.name
        assert "skipped this checkpoint" not in ended.err, folder.name
        assert left_behind(folder) == whole, folder.name


STAND_INS = {
    "scontrol": "echo node0; echo node1",
    "srun": 'exec "$@"',
    "torchrun": 'printf "%s\\n" "$OMP_NUM_THREADS" "$@" > arguments',
}
"""What the script for Slurm calls, on a machine that has none of it."""


def test_the_script_for_slurm_starts_the_same_command(tmp_path):
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "first-run"}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **slurm}

    subprocess.run(
        ["bash", "-eu", "-c", page("#!/bin/bash")], cwd=tmp_path, env=environment, check=True
    )

    threads, *arguments = (tmp_path / "arguments").read_text().splitlines()
    assert threads == "1"
    assert arguments == on_many_nodes()[1:]


def test_the_command_for_many_nodes_is_understood(place, tmp_path):
    options = get_args_parser().parse_args(on_many_nodes()[1:])
    flags = options.training_script_args
    small = ("--sequence-length", 16, "--vocab-size", 64, "--steps", 8, "--data", place / "data")

    run(options.training_script, *flags, *small, "--dry-run", folder=tmp_path)

    assert options.nnodes == "2"
    assert (tmp_path / "outputs").exists() is False


# ------------------------------------------------------------------------------ without a process


@on_ranks(1)
def test_state_without_a_name_is_refused_and_a_file_is_not_in_the_way(ctx, tmp_path):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns, which pytest forbids here

    save, load = solution("checkpoint").save_checkpoint, solution("checkpoint").load_checkpoint
    model = torch.nn.Linear(2, 2)
    shared: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    shared.state["shared"] = {"k": 3}
    divided = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
    said = {shared: "no name to be saved under", divided: "in another optimizer, in parts"}
    for optimizer, words in said.items():
        with pytest.raises(solution("checkpoint").CheckpointError, match=words):
            save(tmp_path, step=1, model=model, optimizer=optimizer)
    (tmp_path / ".step-00000002.tmp").write_text("no folder")
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    save(tmp_path, step=2, model=model, optimizer=plain)
    assert load(tmp_path, model=model, optimizer=plain) == 2


@on_ranks(1)
def test_rates_of_numpy_are_saved_and_lists_of_tensors_keep_their_dtype(ctx, tmp_path):
    """A rate that NumPy computed, and a list of float32 beside bfloat16."""
    save, load = solution("checkpoint").save_checkpoint, solution("checkpoint").load_checkpoint
    model = torch.nn.Linear(2, 2).to(torch.bfloat16)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.param_groups[0]["lr"] = np.float64(0.25)
    optimizer.state[model.bias]["history"] = [torch.full((2,), 1.001)]
    save(tmp_path, step=1, model=model, optimizer=optimizer)
    fresh: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    load(tmp_path, model=model, optimizer=fresh)
    rate = fresh.param_groups[0]["lr"]
    assert (type(rate), rate) == (float, 0.25)
    [kept] = fresh.state[model.bias]["history"]
    assert torch.equal(kept, torch.full((2,), 1.001))
