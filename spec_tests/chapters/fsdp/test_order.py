"""Order: gathers begin before their weights are needed, reductions while backward still runs.

Without overlap, every gather is waited for in full. The order of events on one rank shows overlap
without a clock: where each layer computes in the sequence of collectives. Level `production`; that
a hint changes no number belongs to `correct`. See Zhao et al. 2023, section 3.3.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from spec_tests.chapters.fsdp.sharded import FULLY_SHARD, shard
from spec_tests.programs.laws import refusal, traffic
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses
from spec_tests.rig.ranks.recorder import Log

clause = clauses(judges=FULLY_SHARD, level="production")

OVERLAP = "Zhao et al. 2023, section 3.3; test_fully_shard_comm"
WIDTH, DEPTH = 12, 4
UNIT = WIDTH * WIDTH


class Note(torch.autograd.Function):
    """The identity, which says when it is passed in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mark: Any, index: int) -> torch.Tensor:
        ctx.mark, ctx.index = mark, index
        mark(f"forward {index}")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]  # as documented
        ctx.mark(f"backward {ctx.index}")
        return gradient, None, None


class Layer(nn.Module):
    """A layer whose computation begins, forward and backward, with a note."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.index = index
        self.mark: Any = lambda label: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noted: torch.Tensor = Note.apply(x, self.mark, self.index)
        return self.linear(noted)


ROOT = "root"


class Chain(nn.Sequential):
    """Layers in the order in which a step uses them."""

    def forward(
        self, x: torch.Tensor, order: tuple[int, ...] = tuple(range(DEPTH))
    ) -> torch.Tensor:
        for index in order:
            x = self[index](x)
        return x


def chain(ctx, subject, hints):
    """Layers as units, with the hints given: index to the indices to be gathered ahead.

    The index of the whole model is `ROOT`.
    """
    torch.manual_seed(7)
    model: Any = Chain(*[Layer(i) for i in range(DEPTH)]).to(ctx.device)
    shard(ctx, subject, model, "children", reshard_after_forward=True)
    for kind, table in hints.items():
        for index, ahead in table.items():
            modules = [model[i] for i in ahead]
            unit = model if index == ROOT else model[index]
            getattr(unit, f"set_modules_to_{kind}_prefetch")(modules)
    return model


def events(ctx, subject, hints):
    """Collectives of the second step among the moments at which layers compute."""
    model = chain(ctx, subject, hints)
    inputs = torch.ones(2, WIDTH, device=ctx.device, requires_grad=True)
    model(inputs).sum().backward()
    with ctx.recording() as recorder:
        for layer in model:
            layer.mark = recorder.mark
        model(inputs).sum().backward()
    return recorder.log()


def judge_begun(logs, what, mark, likely, *, least=None, most=None):
    """At least or at most so many layers must be on their way before a mark.

    They are on their way to be "gathered", "reduced", or "regathered".

    "regathered" leaves out those of a forward, in which a backward's gathers may be launched.
    """
    __tracebackhide__ = True
    for rank, log in enumerate(logs):
        before = Log(log.events[: log.position(mark)], peak_bytes=0)
        gathered = traffic.gathered(before, len(logs)) // UNIT
        reduced = traffic.reduced(before) // UNIT
        begun = {"gathered": gathered, "regathered": gathered - DEPTH, "reduced": reduced}[what]
        wanted = f"at least {least}" if most is None else f"at most {most}"
        judge.holds(
            (least is None or begun >= least) and (most is None or begun <= most),
            f"rank {rank}: expected {wanted} of {DEPTH} layers on their way to be {what} before "
            f"{mark} is over, got {begun}",
            likely=likely,
        )


@clause("fsdp.order.gathers-ahead-in-backward", source="contract: gathers-ahead; " + OVERLAP)
def test_backward_gathers_the_next_unit_before_it_computes(world, subject):
    """In backward, the next unit's gather MUST begin before the current unit has computed."""
    logs = world.run(events, subject, {})

    likely = "each unit is gathered when it is needed, and waited for"
    for index in range(DEPTH - 1, 0, -1):
        judge_begun(logs, "regathered", f"backward {index}", likely, least=DEPTH - index + 1)


@clause("fsdp.order.reduces-during-backward", source="contract: flat-peak; " + OVERLAP)
def test_a_unit_is_reduced_while_backward_still_runs(world, subject):
    """In backward, a unit's reduction MUST begin before the second unit after it has computed."""
    logs = world.run(events, subject, {})

    for index in range(DEPTH - 2):
        likely = "everything is reduced after backward"
        judge_begun(logs, "reduced", f"backward {index}", likely, least=DEPTH - index - 2)


@clause(
    "fsdp.order.hints-are-followed",
    source="contract: hints; "
    "FSDPModule.set_modules_to_forward_prefetch, set_modules_to_backward_prefetch",
)
def test_hinted_units_are_gathered_ahead(world, subject):
    """Units named in a hint MUST be gathered before the unit that has it, or it be refused."""
    hints = {"forward": {0: [1, 2]}, "backward": {3: [2, 1, 0]}}
    ordinary: tuple[Any, ...] = (events, subject, {})
    logs = refusal.answer_or_refusal(world, events, subject, hints, ordinary=ordinary)

    for what, mark, least in (("gathered", "forward 0", 3), ("regathered", "backward 3", 4)):
        judge_begun(logs or (), what, mark, "the hint is stored and never read", least=least)


@clause(
    "fsdp.order.hints-replace-the-default",
    source="contract: hints; "
    "FSDPModule.set_modules_to_backward_prefetch: it overrides the default prefetching",
)
def test_a_backward_hint_takes_the_place_of_the_next_unit(world, subject):
    """A backward hint MUST take the default's place: what it leaves out is not gathered ahead.

    Who names the units has counted the memory for these. The whole model has a hint as well: by
    default it may gather the last two units.
    """
    logs = world.run(events, subject, {"backward": {ROOT: [3], 3: [1]}})

    judge_begun(logs, "regathered", "backward 3", "the next unit is gathered as well", most=2)


def hinted_training(ctx, subject, hints, order):
    """Outputs and gradients over steps, layers being used in the given order."""
    model = chain(ctx, subject, hints)
    generator = torch.Generator().manual_seed(ctx.rank)
    found = {}
    for step, indices in enumerate(order):
        x = model(torch.randn(2, WIDTH, generator=generator).to(ctx.device), indices)
        x.square().mean().backward()
        found[f"output {step}"] = x.detach()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[f"{name} {step}"] = parameter.grad.to_local().clone()
                parameter.grad = None
    return found


HINTS = {
    "next": {"forward": {i: [i + 1] for i in range(3)}},
    "all-at-once": {"forward": {0: [1, 2, 3]}, "backward": {3: [2, 1, 0]}},
    "wrong-way": {"forward": {2: [0], 3: [1]}, "backward": {1: [3], 0: [2]}},
}


@clause(
    "fsdp.order.hints-change-no-bit",
    level="correct",
    source="contract: hints; a hint says when to gather, not what",
)
@pytest.mark.parametrize("hints", HINTS)
def test_no_hint_changes_a_bit(world, subject, hints):
    """Whatever the prefetch hints, outputs and gradients MUST have the same bits, or an error."""
    order = [[0, 1, 2, 3], [3, 1, 0, 2], [0, 2], [0, 1, 2, 3]]
    plain: Any = (hinted_training, subject, {}, order)
    given = f"hints {HINTS[hints]}"
    ranks = refusal.answer_or_refusal(
        world, hinted_training, subject, HINTS[hints], order, ordinary=plain
    )
    if ranks is not None:
        judge.tensors(ranks, world.run(*plain), quantity="value without hints", given=given)


PATIENCE_S = 5.0
"""How long a straggler waits to be overtaken: a layer takes milliseconds."""


def overtaken(ctx, subject, phase):
    """Whether rank 0 computed the second layer of a pass while rank 1 was still in the first."""
    model = chain(ctx, subject, {})
    order = range(DEPTH) if phase == "forward" else range(DEPTH)[::-1]
    first, second = (f"{phase} {index}" for index in list(order)[:2])
    reached = ctx.scratch / f"{subject}-{phase}"
    reached.unlink(missing_ok=True)
    ctx.barrier()
    seen = []

    def straggle(label):
        if label == second and ctx.rank == 0:
            reached.touch()
        if label == first and ctx.rank == 1:
            until = time.monotonic() + PATIENCE_S
            while not reached.exists() and time.monotonic() < until:
                time.sleep(0.01)
            seen.append(reached.exists())

    inputs = torch.ones(2, WIDTH, device=ctx.device, requires_grad=True)
    for mark in (lambda label: None, straggle):
        for layer in model:
            layer.mark = mark
        model(inputs).sum().backward()
    return seen


@clause(
    "fsdp.order.runs-ahead-of-a-straggler",
    source=f"{OVERLAP}; Efficient DL week 5, tasks 2 and 3",
    transports=("gloo", "cuda"),
)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_rank_held_up_in_a_layer_does_not_hold_up_the_next(world, subject, phase):
    """While one rank computes a layer, another SHOULD be able to go on to the next one.

    What is gathered ahead has left already, and a reduction is not waited for where it begins. Who
    waits at once makes every layer as slow as its slowest rank. It is right all the same, and
    PyTorch's own gathers nothing ahead on a CPU.
    """
    # A straggler that gives up is a finding; called a hang first on some machines, it would be two.
    ranks = world.run(overtaken, subject, phase, grace_s=4 * PATIENCE_S, timeout_s=5 * PATIENCE_S)

    judge.equal(
        [ranks[1]],
        [True],
        quantity="rank 0 went on while rank 1 was held up:",
        given="if not, a gather or a reduction is waited for where it is launched",
    )
