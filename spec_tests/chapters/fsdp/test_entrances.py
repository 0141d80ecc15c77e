"""Entrances and exemptions: methods beside `forward`, and parameters that stay whole.

Encoders, heads and chunked losses are called by methods of their own. No hook of a module sees such
a call, so it must be registered; what is not registered finds shards, and must not compute with a
shard as if it were the weight. And a parameter that is left out is left out of everything.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from spec_tests.chapters.fsdp.sharded import FULLY_SHARD, of_integers
from spec_tests.programs.laws import refusal, traffic
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses
from spec_tests.rig.judge.symptoms import Hint
from spec_tests.rig.toys import sum_of_squares

clause = clauses(judges=FULLY_SHARD, level="production")

METHODS = "torch.distributed.fsdp.register_fsdp_forward_method; its test"
IGNORED = "torch.distributed.fsdp.fully_shard, ignored_params; test_fully_shard_ignore_params"


class Encoder(nn.Module):
    """Two layers and a table, with a method that a forward calls, and methods that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.layer = nn.Linear(6, 4)
        self.table = nn.Parameter(torch.empty(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x) @ self.table

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """[n, 6] to [n, 4]."""
        return self.layer(self.inner(x).abs())

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """[n] to [n, 4]."""
        return F.embedding(ids, self.table)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        """[n, 6] to [n, 4], by way of forward, and on from there."""
        return self(x) @ self.table

    def level(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the table; x only says where."""
        return self.table.sum()


def encoder() -> Any:
    """Of small integers."""
    return of_integers(Encoder())


def batch(rank: int) -> torch.Tensor:
    """Inputs `[3, 6]` of integers."""
    return torch.arange(18.0).view(3, 6).add(rank).remainder(7) - 3


def _gradients(size, names, call=lambda module, x: module(x)):
    """Mean over ranks of the local gradients times their number, and each rank's own."""
    own: list[dict[str, Any]] = []
    for rank in range(size):
        module = encoder()
        (size * sum_of_squares(call(module, batch(rank)))).backward()
        own.append({name: module.get_parameter(name).grad for name in names})
    return {name: sum(one[name] for one in own) / size for name in names}, own


ENTRANCES: dict[str, Any] = {
    "method": lambda module: module.encode,
    "forward-calls-method": lambda module: module,
    "method-calls-forward": lambda module: module.score,
}


WAYS: dict[str, tuple[str, bool | None]] = {
    "method": ("method", None),
    "method-freed": ("method", True),
    "forward-calls-method": ("forward-calls-method", None),
    "forward-calls-method-freed": ("forward-calls-method", True),
    # freed after its forward, a module has no weights that the method could go on with
    "method-calls-forward": ("method-calls-forward", None),
}


def entered(ctx, subject, entrance, setting):
    """Outputs, gradients and kinds of parameters of a step through one entrance."""
    module = encoder().to(ctx.device)
    for part in (module.inner, module):
        ctx.impl.fully_shard(part, reshard_after_forward=setting)
    name = "score" if entrance == "method-calls-forward" else "encode"
    ctx.impl.register_fsdp_forward_method(module, name)
    output = ENTRANCES[entrance](module)(batch(ctx.rank).to(ctx.device))
    kinds = sorted({type(p).__name__ for p in module.parameters()}) if setting else ["DTensor"]
    (ctx.world_size * sum_of_squares(output)).backward()
    reached = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    gradients = {name: gradient.full_tensor() for name, gradient in reached.items()}
    return {"output": output.detach()}, gradients, kinds


@clause(
    "fsdp.lifecycle.registered-method",
    level="correct",
    needs=("register_fsdp_forward_method",),
    source="contract: full-weights; " + METHODS,
)
@pytest.mark.parametrize("way", WAYS)
def test_a_registered_method_is_like_forward(world, subject, way):
    """Like `forward`, a registered method MUST compute with full weights and get mean gradients.

    Also where `forward` calls it and computes on, or it calls `forward` and does: what is called is
    then no end of anything.
    """
    entrance, setting = WAYS[way]
    ranks = world.run(entered, subject, entrance, setting)
    outputs, gradients, kinds = zip(*ranks, strict=True)

    def call(module, x):
        return ENTRANCES[entrance](module)(x)

    names = [n for n, _ in encoder().named_parameters() if n != "table" or entrance != "method"]
    mean, _ = _gradients(world.size, names, call)
    plain = [{"output": call(encoder(), batch(rank)).detach()} for rank in range(world.size)]
    judge.tensors(outputs, plain, quantity="output")
    judge.tensors(gradients, mean, quantity="mean gradient")
    judge.equal(kinds, ["DTensor"], quantity="kind after the call")


CALLS: dict[str, Any] = {
    "linear": lambda module, rank: module.encode(batch(rank)),
    "embedding": lambda module, rank: module.look_up(torch.tensor([0, 1])),
    "sum": lambda module, rank: module.level(batch(rank)),
}


def registered_in_vain(ctx, subject):
    """The output of a registered method of a model that was never sharded."""
    module = encoder().to(ctx.device)
    ctx.impl.register_fsdp_forward_method(module, "encode")
    return {"output": module.encode(batch(ctx.rank).to(ctx.device)).detach()}


@clause(
    "fsdp.lifecycle.registered-method-of-unsharded",
    needs=("register_fsdp_forward_method",),
    source="contract: sharded-only; " + METHODS,
    worlds=(2,),
)
def test_a_module_that_is_not_sharded_keeps_its_method(world, subject):
    """Registering a method of a module that is not sharded MUST change nothing."""
    plain = [{"output": encoder().encode(batch(rank)).detach()} for rank in range(world.size)]
    judge.tensors(world.run(registered_in_vain, subject), plain, quantity="output")


def unregistered(ctx, subject, case):
    """What a method gives that nobody has registered; None where it raises."""
    module = encoder().to(ctx.device)
    for part in (module.inner, module):
        ctx.impl.fully_shard(part, reshard_after_forward=True)
    module(batch(ctx.rank).to(ctx.device)).sum().backward()  # as in the middle of a training
    with refusal.caught():
        found = CALLS[case](module, ctx.rank)
        return {"found": (found.full_tensor() if hasattr(found, "full_tensor") else found).detach()}
    return {"found": None}


@clause(
    "fsdp.refusals.unregistered-method",
    level="correct",
    source=f"contract: as-pytorch; {METHODS}: a DTensor does not mix with plain tensors",
)
@pytest.mark.parametrize("case", CALLS)
def test_a_method_that_is_not_registered_does_not_compute_on_a_shard(world, subject, case):
    """An unregistered method MUST raise or use full weights, never compute on a shard."""
    ranks = world.run(unregistered, subject, case)

    for rank, seen in enumerate(ranks):
        if seen["found"] is not None:
            right = {"found": CALLS[case](encoder(), rank).detach()}
            judge.tensors([seen], [right], quantity=f"what the method gives on rank {rank}")


def entered_again(ctx, subject):
    """What a step through a registered method sees after an exception in the one before."""
    module = encoder().to(ctx.device)
    for part in (module.inner, module):
        ctx.impl.fully_shard(part, reshard_after_forward=True)
    ctx.impl.register_fsdp_forward_method(module, "encode")

    def fail(*args):
        raise KeyError("planted")

    handle = module.inner.register_forward_hook(fail)
    with contextlib.suppress(KeyError):
        module.encode(batch(ctx.rank).to(ctx.device))
    handle.remove()
    output = module.encode(batch(ctx.rank).to(ctx.device))
    kinds = sorted({type(p).__name__ for p in module.parameters()})
    (ctx.world_size * sum_of_squares(output)).backward()
    reached = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    return kinds, {name: gradient.full_tensor() for name, gradient in reached.items()}


@clause(
    "fsdp.lifecycle.registered-method-after-exception",
    level="correct",
    needs=("register_fsdp_forward_method",),
    source="contract: after-exception, full-weights; " + METHODS,
)
def test_a_step_after_a_registered_method_raised_is_right(world, subject):
    """After a caught exception in a registered method the next step MUST be right, or an error."""
    ordinary = (entered, subject, "method", True)
    ranks = refusal.answer_or_refusal(world, entered_again, subject, ordinary=ordinary)
    if ranks is None:
        return
    kinds, gradients = zip(*ranks, strict=True)
    judge.equal(kinds, ["DTensor"], quantity="kinds of parameters after the next call")
    names = [name for name, _ in encoder().named_parameters() if name != "table"]
    mean, _ = _gradients(world.size, names, lambda module, x: module.encode(x))
    judge.tensors(gradients, mean, quantity="mean gradient")


def ignoring(ctx, subject, is_frozen=False):
    """A step with one parameter left out: what it is, its gradient, and what was sent."""
    module = encoder().to(ctx.device)
    held = module.table.requires_grad_(not is_frozen)
    values = held.detach().clone()
    ctx.impl.fully_shard(module.inner, reshard_after_forward=True)
    ctx.impl.fully_shard(module, reshard_after_forward=True, ignored_params={held})
    seen = [module.table is held, type(held).__name__, tuple(held.shape), torch.equal(held, values)]
    with ctx.recording() as recorder:
        loss = ctx.world_size * sum_of_squares(module(batch(ctx.rank).to(ctx.device)))
        loss.backward()
    sent = [traffic.gathered(recorder.log(), ctx.world_size), traffic.reduced(recorder.log())]
    others = {n: p.grad.full_tensor() for n, p in module.named_parameters() if n != "table"}
    return seen, {"table": held.grad}, others, sent


@clause("fsdp.init.ignored-parameters", source="contract: ignored; " + IGNORED)
@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
def test_an_ignored_parameter_stays_what_it_is(world, subject, is_frozen):
    """An ignored parameter MUST stay the same object: plain, whole, with its values."""
    seen, *_ = zip(*world.run(ignoring, subject, is_frozen), strict=True)

    right = [True, "Parameter", (4, 4), True]
    judge.equal(seen, right, quantity="(same object, its type, its shape, same values)")


def ignoring_on_meta(ctx, subject):
    """Types of the ignored parameter and of the others, without values yet."""
    module = encoder().to("meta")
    held = module.table
    ctx.impl.fully_shard(module, ignored_params={held})
    others = sorted({type(p).__name__ for p in module.parameters() if p is not held})
    return module.table is held, type(held).__name__, others


@clause(
    "fsdp.init.ignored-on-the-meta-device",
    source="contract: ignored; " + IGNORED + "; deferred initialisation",
)
def test_what_is_ignored_on_the_meta_device_is_that_alone(world, subject):
    """On the meta device too, an ignored parameter alone MUST stay plain, or it is refused."""
    ranks = refusal.answer_or_refusal(
        world, ignoring_on_meta, subject, ordinary=(ignoring, subject)
    )
    if ranks is not None:
        judge.equal(ranks, (True, "Parameter", ["DTensor"]), quantity="(same object, types)")


@clause("fsdp.traffic.ignored-parameters", source="contract: ignored; " + IGNORED)
def test_an_ignored_parameter_is_neither_gathered_nor_reduced(world, subject):
    """An ignored parameter MUST NOT be sent: its gradient stays local, the others get the mean."""
    _, own, others, sent = zip(*world.run(ignoring, subject), strict=True)

    names = [name for name, _ in encoder().named_parameters()]
    mean, local = _gradients(world.size, names)
    reduced = Hint("the mean over ranks: it was reduced", [{"table": mean["table"]}] * world.size)
    judge.tensors(
        own,
        [{"table": gradients["table"]} for gradients in local],
        quantity="this rank's own gradient",
        hints=[reduced],
    )
    wanted = {name: mean[name] for name in names if name != "table"}
    judge.tensors(others, wanted, quantity="mean gradient")
    count = sum(p.numel() for n, p in encoder().named_parameters() if n != "table")
    judge.equal(sent, [2 * count, count], quantity="elements gathered and reduced")
