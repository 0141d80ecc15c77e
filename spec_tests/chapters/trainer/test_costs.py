"""Costs: what a step sends, and what each rank holds.

A trainer that is called "sharded" and keeps everything everywhere trains right; its user pays for
what was promised to be saved. Judged by what stays alive and by what is sent, never by names.
"""

from __future__ import annotations

from torch import nn

from spec_tests.programs.laws import footprint, traffic
from spec_tests.programs.scene import TRAINERS
from spec_tests.programs.trained import OnRank
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses
from spec_tests.rig.ranks.errors import NotOffered

clause = clauses(judges=TRAINERS, level="production", worlds=(2,))
WIDTH, DEPTH = 96, 12
BYTES = 4 * DEPTH * (WIDTH * 6 + 6 * WIDTH)


def log_of(ctx, subject, scene, evaluates=False):
    """What is sent in a step, or in an evaluation, after a step."""
    run = OnRank(ctx, subject, scene)
    call = run.method("evaluate" if evaluates else "step")
    run.trainer.step(run.batches(1))
    with ctx.recording() as recorder:
        call(run.batch(ctx.rank, 50) if evaluates else run.batches(2))
    return recorder.log()


@clause(
    "trainer.traffic.reduces-once-per-step",
    source="contract: one-reduction; DistributedDataParallel, no_sync",
)
def test_gradients_are_reduced_once_per_step(world, subject):
    """A step of several micro-batches MUST reduce no more elements than a step of one."""
    one, many = (world.run(log_of, subject, f"mlp {number}") for number in ("of-one", "of-four"))

    for rank in range(world.size):
        wanted, seen = (traffic.reduced(ranks[rank]) for ranks in (one, many))
        judge.holds(
            seen <= wanted + 8 * 4,  # losses and flags may be reduced for each
            f"rank {rank}: expected reductions of {wanted} elements in a step of 4 micro-batches, "
            f"as in a step of one, got {seen}",
            likely="gradients are reduced after every micro-batch: no_sync is missing or ignored",
        )


@clause("trainer.traffic.evaluation-reduces-nothing", source="contract: silent-evaluation")
def test_an_evaluation_reduces_nothing(world, subject):
    """An evaluation MUST NOT reduce gradients; a loss that is averaged over ranks may be sent."""
    for rank, log in enumerate(world.run(log_of, subject, "mlp", True)):
        seen = traffic.reduced(log)
        judge.holds(seen <= 8, f"rank {rank}: expected no reduction, got {seen} elements")


class Wide(nn.Module):
    """Layers that are large beside any bookkeeping."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, WIDTH, bias=False), nn.Linear(WIDTH, 6, bias=False))
            for _ in range(DEPTH)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


def held(ctx, subject, scene, after=(2,), reads=False):
    """Bytes held after some numbers of steps, with `reads` of the weights; and what stands in."""
    found = []
    with ctx.recording() as recorder:
        run = OnRank(ctx, subject, scene, module=Wide)
        batches = run.batches(1)
        for number in range(1, max(after) + 1):
            run.trainer.step(batches)
            if reads:
                run.trainer.full_parameters()
            if number in after:
                found.append(footprint.settled(recorder, looks=10, pause_s=0.01))
    return found, run.stands_in


LARGEST = 4 * WIDTH * 6
PADDING = 64 * 2 * DEPTH  # counters of steps, and what fills flat buffers up


@clause(
    "trainer.footprint.state-is-divided",
    judges=("build_zero1_trainer", "build_fsdp_trainer"),
    level="correct",
    source="contract: state-divided; Rajbhandari et al. 2020, section 5.1",
)
def test_the_optimizers_state_is_divided(world, subject):
    """A rank's optimizer state MUST be at most its share plus that of the largest parameter.

    What AdamW holds beyond SGD without momentum is the state, wherever it is kept.
    """
    with_state = world.run(held, subject, "mlp adamw")
    without = world.run(held, subject, "mlp sgd")
    if any(stands_in for _, stands_in in (*with_state, *without)):
        raise NotOffered("both AdamW and SGD: what one of them holds beyond the other is judged")

    footprint.at_most(
        [more - less for ([more], _), ([less], _) in zip(with_state, without, strict=True)],
        {
            "its share of two moments": 2 * BYTES // world.size,
            "those of the largest parameter": 2 * LARGEST,
            "counters and padding": PADDING,
        },
        quantity="state",
        likely="every rank keeps the state of all parameters",
        given=f"{DEPTH} blocks of two layers, {BYTES} bytes of weights, {world.size} ranks",
    )


@clause(
    "trainer.footprint.parameters-are-divided",
    judges=("build_fsdp_trainer",),
    level="correct",
    source="contract: parameters-divided; "
    "Rajbhandari et al. 2020, section 5.3; Zhao et al. 2023, section 4.1",
    worlds=(4,),
)
def test_parameters_are_divided(world, subject):
    """A trainer that divides parameters MUST hold its share of weights and gradients alone.

    On four ranks: three shares, with float32 weights beside those of the model, are less than all
    weights, which a trainer that drops its gradients holds where nothing is divided.
    """
    ranks = world.run(held, subject, "mlp sgd")
    footprint.at_most(
        [held_bytes for [held_bytes], _ in ranks],
        {
            "its share of weights, gradients and float32 weights": 3 * BYTES // world.size,
            "its rows of two moments": bool(ranks[0][1]) * (2 * BYTES // world.size + LARGEST),
            "a block's weights": 2 * LARGEST,
            "micro-batches, counters and padding": PADDING + 4096,
        },
        quantity="resident bytes between steps",
        likely="full weights or gradients stay on every rank",
        given=f"{DEPTH} blocks of two layers, {BYTES} bytes of weights, {world.size} ranks",
    )


@clause(
    "trainer.footprint.does-not-grow",
    level="correct",
    source="contract: no-growth; pytorch issue 158719",
)
def test_memory_does_not_grow(world, subject):
    """The memory that a trainer holds between steps MUST NOT grow from step to step."""
    for rank, ((few, many), _) in enumerate(
        world.run(held, subject, "mlp momentum of-two", (2, 8), True)
    ):
        judge.holds(
            many <= few + 1024,
            f"rank {rank}: expected {few} bytes after 8 steps, as after 2, got {many}",
            likely="gradients, graphs or handles of earlier steps are kept",
        )
