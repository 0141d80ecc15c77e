"""How fast the rig is: calls, hypothesis examples, recovery; beside starting ranks for each test.

Two ranks, one thread each. Every figure is the median of several repetitions with its range; the
start-per-test column does what course test suites do (spawn the ranks, build the group, run one
body, join) in the same run.

    calls          round trips of an empty body on live ranks, per second
    examples       hypothesis examples per second: a flat-bucket data-parallel step on the ranks,
                   judged in the parent against a step computed there
    recovery       SIGKILL a rank, notice it, fork a new pool, join a group, all-reduce: seconds
    spawned test   the same all-reduce with ranks spawned for it: seconds
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from spec_tests.benchmarks.paired import environment, table
from spec_tests.rig.errors import RankDied
from spec_tests.rig.rank import Context
from spec_tests.rig.world import Worlds
from spec_tests.rig.zygote import RANK_ENVIRONMENT, start_zygote

RESULTS = Path(__file__).with_name("results")
BOUNDS = {"calls": 1500.0, "examples": 200.0, "recovery": 0.25}


def empty(ctx: Context) -> None:
    """Nothing."""


def total(ctx: Context) -> float:
    """One all-reduce."""
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    return float(tensor[0])


def flat_bucket_step(ctx: Context, sizes: tuple[int, ...], seed: int) -> torch.Tensor:
    """Local gradients of all parameters in one bucket, averaged; the update of one SGD step."""
    own = _gradients(sizes, seed + ctx.rank)
    flat = torch.cat([gradient.reshape(-1) for gradient in own]) / ctx.world_size
    dist.all_reduce(flat)
    return flat


def _gradients(sizes: tuple[int, ...], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-8, 9, (size,), generator=generator).double() for size in sizes]


def calls_per_second(worlds: Worlds, number: int = 1500) -> float:
    """Round trips of an empty body."""
    world = worlds.world(2)
    world.run(empty)
    begun = time.perf_counter()
    for _ in range(number):
        world.run(empty)
    return number / (time.perf_counter() - begun)


def examples_per_second(worlds: Worlds, number: int = 200) -> float:
    """Hypothesis examples whose body runs on the ranks."""
    world = worlds.world(2)
    executed = 0

    @settings(
        max_examples=number,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4).map(tuple),
        seed=st.integers(0, 10_000),
    )
    def step_is_the_mean(sizes: tuple[int, ...], seed: int) -> None:
        nonlocal executed
        executed += 1
        ranks = world.run(flat_bucket_step, sizes, seed)
        both = zip(_gradients(sizes, seed), _gradients(sizes, seed + 1), strict=True)
        expected = torch.cat([(a + b) / 2 for a, b in both])
        assert all(torch.equal(rank, expected) for rank in ranks)

    begun = time.perf_counter()
    step_is_the_mean()
    return executed / (time.perf_counter() - begun)


def recovery_s(worlds: Worlds) -> float:
    """From the SIGKILL of a rank to the first all-reduce of the pool that replaces it."""
    world = worlds.world(2)
    world.run(total)
    victim = worlds.pool(2, None, "gloo").pids()[1]
    begun = time.perf_counter()
    os.kill(victim, signal.SIGKILL)
    try:
        world.run(total)
    except RankDied:
        world.run(total)
    return time.perf_counter() - begun


def spawned_test_s() -> float:
    """Spawn two ranks, build a group, one all-reduce, join: what a test costs without a pool."""
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    begun = time.perf_counter()
    ranks = [context.Process(target=_spawned, args=(rank, store.port)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return time.perf_counter() - begun


def _spawned(rank: int, port: int) -> None:
    os.environ.update(RANK_ENVIRONMENT)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()


def measure(repetitions: int) -> dict[str, list[float]]:
    """All figures, the measurements in turn so that a slow moment meets all of them."""
    worlds = Worlds()
    found: dict[str, list[float]] = {n: [] for n in ("calls", "examples", "recovery", "spawned")}
    measures: dict[str, Callable[[], float]] = {
        "calls": lambda: calls_per_second(worlds),
        "examples": lambda: examples_per_second(worlds),
        "recovery": lambda: recovery_s(worlds),
        "spawned": spawned_test_s,
    }
    try:
        for _ in range(repetitions):
            for name, run in measures.items():
                found[name].append(run())
    finally:
        worlds.close()
    return found


def render(found: dict[str, list[float]]) -> str:
    """The table."""
    rows = [["what", "median", "lowest", "highest", "bound", "verdict"]]
    words = {
        "calls": ("empty calls per second", "at least"),
        "examples": ("hypothesis examples per second", "at least"),
        "recovery": ("kill, respawn, first all-reduce: s", "at most"),
        "spawned": ("the same all-reduce in spawned ranks: s", ""),
    }
    for name, values in found.items():
        label, sense = words[name]
        middle, bound = statistics.median(values), BOUNDS.get(name)
        holds = bound is None or (middle >= bound if sense == "at least" else middle <= bound)
        rows.append(
            [
                label,
                f"{middle:.3g}" if middle < 100 else f"{middle:.0f}",
                f"{min(values):.3g}" if middle < 100 else f"{min(values):.0f}",
                f"{max(values):.3g}" if middle < 100 else f"{max(values):.0f}",
                f"{sense} {bound:g}" if bound else "",
                "" if bound is None else "holds" if holds else "missed",
            ]
        )
    return table(rows)


def main(argv: list[str]) -> int:
    """Measure, print, write `results/rig.md` and `.json`; 1 if a bound is missed."""
    parser = argparse.ArgumentParser(prog="python -m spec_tests.benchmarks rig")
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args(argv)
    start_zygote()
    torch.set_num_threads(1)
    found = measure(options.repetitions)
    where: dict[str, Any] = environment()
    lines = "\n".join(f"- {key}: {value}" for key, value in where.items())
    text = f"# The rig, two ranks on gloo\n\n{render(found)}\n\n{lines}\n"
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "rig.md").write_text(text)
    (RESULTS / "rig.json").write_text(json.dumps({"environment": where, "found": found}, indent=1))
    return int("missed" in text)
