"""How fast the rig is: calls, hypothesis examples, recovery; beside starting ranks for each test.

Two ranks where nothing else is said, one thread each. Every figure (`FIGURES`) is the median of
several repetitions with its range.
"""

import argparse
import contextlib
import itertools
import os
import random
import signal
import statistics
import time
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from spec_tests.bench import runner
from spec_tests.bench.runner import Figure
from spec_tests.impls import parse
from spec_tests.programs import law
from spec_tests.programs.calls import Program
from spec_tests.programs.draw import covering, situation_in
from spec_tests.rig.judge import oracle
from spec_tests.rig.judge.runner import run_case
from spec_tests.rig.ledger import load_all
from spec_tests.rig.outcomes import Outcome
from spec_tests.rig.ranks.errors import RankDied
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.world import Worlds
from spec_tests.rig.ranks.zygote import RANK_ENVIRONMENT, start_zygote
from spec_tests.rig.sim import Deadlock
from spec_tests.rig.strategies import register_profiles


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


def calls_per_second(worlds: Worlds) -> float:
    """Round trips of an empty body on live ranks."""
    world = worlds.world(2)
    world.run(empty)
    begun = time.perf_counter()
    for _ in range(1500):
        world.run(empty)
    return 1500 / (time.perf_counter() - begun)


def examples_per_second(
    worlds: Worlds, number: int = 200, *, size: int = 2, transport: str = "gloo"
) -> float:
    """Hypothesis examples: a step on `size` ranks, a power of two, judged beside one made here."""
    world = worlds.world(size, transport=transport)
    world.run(empty)
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
        each = [torch.cat(_gradients(sizes, seed + rank)) for rank in range(size)]
        expected = torch.stack(each).sum(dim=0) / size
        assert all(torch.equal(rank, expected) for rank in ranks)

    begun = time.perf_counter()
    step_is_the_mean()
    return executed / (time.perf_counter() - begun)


def situations_per_second(worlds: Worlds, subject: str, number: int = 24) -> float:
    """Drawn programs of twelve calls, judged on two ranks; the oracle remembers none."""
    world = worlds.world(2, parse("solution"))
    rows = [row for row in covering(subject, 2, "correct") if not row.may_be_refused_by(subject)]
    chance = random.Random(1)
    lines = []
    for row in itertools.islice(itertools.cycle(rows), number):
        program: Program = ()
        while len(program) < 12:
            program += law.read(situation_in(row, subject, 2, "correct", chance))[1]
        lines.append(law.written(row, program[:12]))
    law.same_as_alone(world, subject, lines[0])
    oracle.forget()
    begun = time.perf_counter()
    for line in lines:
        law.same_as_alone(world, subject, line)
    return number / (time.perf_counter() - begun)


def leave_early(ctx: Context) -> None:
    """Rank 0 waits for a rank that has left."""
    if ctx.rank == 0:
        dist.all_reduce(torch.ones(4))


def deadlock_ms(worlds: Worlds) -> float:
    """From the call to the table of who waits where; the median of twenty."""
    world = worlds.world(2, transport="sim")
    taken = []
    for _ in range(20):
        begun = time.perf_counter()
        with contextlib.suppress(Deadlock):
            world.run(leave_early)
        taken.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(taken)


def ddp_chapter_s() -> float:
    """Every case of every clause of the ddp chapter on the reference, all of it anew."""
    register_profiles()
    settings.load_profile("quick")
    oracle.forget()
    target = parse("solution")
    clauses = [c for c in load_all() if c.chapter == "ddp" and "sim" in c.transports]
    begun = time.perf_counter()
    with contextlib.closing(Worlds("sim")) as worlds:
        results = [run_case(c, target, case, worlds) for c in clauses for case in c.cases()]
    failed = [
        f"{r.clause.id} {r.case}: {r.message}" for r in results if r.outcome is not Outcome.PASSED
    ]
    assert not failed, failed
    return time.perf_counter() - begun


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
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    begun = time.perf_counter()
    torch.multiprocessing.spawn(_spawned, (store.port,), nprocs=2)
    return time.perf_counter() - begun


def _spawned(rank: int, port: int) -> None:
    os.environ.update(RANK_ENVIRONMENT)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()


def _on_sim(size: int, number: int, bound: float) -> Figure:
    return Figure(
        f"{EXAMPLES}, {size} simulated ranks",
        lambda worlds: examples_per_second(worlds, number, size=size, transport="sim"),
        "at least",
        bound,
    )


EXAMPLES = "hypothesis examples per second"
CHAPTER = "the whole ddp chapter on simulated ranks: s"
FIGURES = {
    "calls": Figure("empty calls per second", calls_per_second, "at least", 1500.0),
    "examples": Figure(EXAMPLES, examples_per_second, "at least", 200.0),
    "sim 2": _on_sim(2, 200, 300.0),
    "sim 4": _on_sim(4, 200, 150.0),
    "sim 8": _on_sim(8, 100, 60.0),
    **{
        f"situations of {subject}": Figure(
            f"situations of {subject} per second",
            partial(situations_per_second, subject=subject),
            "at least",
            8.0,
        )
        for subject in ("ddp", "fully_shard", "sharded_optimizer")
    },
    "deadlock": Figure("a deadlock on simulated ranks: ms", deadlock_ms, "at most", 10.0),
    "ddp on sim": Figure(CHAPTER, lambda _: ddp_chapter_s(), "at most", 10.0),
    "recovery": Figure("kill, respawn, first all-reduce: s", recovery_s, "at most", 0.25),
    "spawned": Figure("the same all-reduce in spawned ranks: s", lambda _: spawned_test_s()),
}


class Rig(runner.Figures):
    """Figures of the rig itself, not of an implementation."""

    name = "rig"
    title = "The rig"
    figures = FIGURES

    def sections(self, options: argparse.Namespace, worlds: Worlds) -> Iterator[runner.Section]:
        """Have processes ready, a thread each."""
        start_zygote()
        torch.set_num_threads(1)
        worlds.max_pools = len(FIGURES)
        yield from super().sections(options, worlds)


BENCHMARK = Rig()
