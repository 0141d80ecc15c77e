"""The reference's `fully_shard` is PyTorch's in names and behaviour, or its README says where not.

Names, parameters and defaults are compared one by one; those that differ are in the first table of
`solution/README.md`. Then small programs run with both, on two ranks, some on three and four. What
comes out (values to the bit, or the class of an error) is equal for everyday programs. The others
are the rows of the second table, with both outcomes. What stands in a table and no longer differs
is an error as well.
"""

import copy
import dataclasses
import importlib
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from spec_tests.chapters.fsdp.test_refusals import Carried
from spec_tests.impls import parse
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.world import Worlds
from spec_tests.rig.target import REPOSITORY_ROOT
from spec_tests.tests.reference.launch import on_ranks

THEIRS = "torch.distributed.fsdp"
OURS = "solution.parallel.fsdp"
OPTIONS = {"shard_placement_fn", "offload_policy", "dp_mesh_dims"}
"""Taken by both, and refused by ours unless they say what is done anyway."""
pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="the table is about torch 2.13"
)
Programs = Iterator[tuple[str, Callable[[], Any]]]
X = torch.arange(8.0).view(2, 4) - 3


def layers(**options: Any) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4, **options), nn.ReLU(), nn.Linear(4, 4, **options))


def sharded(api: Any, **options: Any) -> Any:
    model = layers()
    for part in (model[0], model):
        api.fully_shard(part, **options)
    return model


def kinds(model: nn.Module) -> str:
    return ", ".join(sorted({type(p).__name__ for p in model.parameters()}))


def seen(model: nn.Module) -> list[Any]:
    """Names, and local values and gradients."""
    tensors = [t for p in model.parameters() for t in (p.detach(), p.grad)]
    local: list[Any] = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return [*dict(model.named_parameters()), *(t if t is None else t.tolist() for t in local)]


def stepped(model: Any, call: Any = None) -> list[Any]:
    """Losses of two steps, and what they leave."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = (call or model)(X + torch.distributed.get_rank()).float().sum()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return [losses, *seen(model)]


def trains(model: Any) -> str:
    model(X).sum().backward()
    return "trains" if all(p.grad is not None for p in model.parameters()) else "does not"


def outcome(program: Callable[[], Any]) -> Any:
    """What the program returns if that is plain data, or the class of its error."""
    try:
        found = program()
    except Exception as error:
        return type(error).__name__
    return found if isinstance(found, str | list) else "taken"


def options(api: Any) -> Programs:
    def steps(**how: Any) -> list[Any]:
        return stepped(sharded(api, **how))

    for setting in (None, True, False, 1, 2, 3, "yes"):
        yield f"reshard {setting}", partial(steps, reshard_after_forward=setting)
    policy = api.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    size = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("replicate", "shard"))
    yield "mixed precision", partial(steps, mp_policy=policy)
    yield "HSDP", partial(steps, mesh=mesh)
    model, parts = layers(), layers()
    yield "ignored", lambda: stepped(api.fully_shard(model, ignored_params={model[0].weight}))
    yield "list", lambda: api.fully_shard([*parts[::2]]) and stepped(api.fully_shard(parts))


def parameters(api: Any) -> Programs:
    for dtype in (torch.int8, torch.uint8, torch.int64, torch.float8_e4m3fn):
        model = layers()
        model.codes = nn.Parameter((torch.arange(4) % 3).to(dtype), requires_grad=False)
        model.register_forward_hook(lambda module, _, found: found * module.codes.float())
        yield f"{dtype}", partial(lambda m: stepped(api.fully_shard(m)), model)
    yield "on meta", lambda: api.fully_shard(layers(device="meta"))(X)
    yield "no module", lambda: api.fully_shard(3)
    yield "container", lambda: api.fully_shard(nn.ModuleList(layers()))
    called = type("Called", (nn.ModuleList,), {"forward": lambda self, x: self[0](x)})
    yield "container with a forward", lambda: stepped(api.fully_shard(called([layers()[0]])))


def transforms(api: Any) -> Programs:
    def forward_mode(**how: Any) -> list[Any]:
        model = sharded(api, **how)
        pair: Any = torch.func.jvp(model, (X,), (torch.ones_like(X),))
        (pair[0].sum() + pair[1].sum()).backward()
        return [pair[0].tolist(), pair[1].tolist(), *seen(model)]

    model = sharded(api)
    yield "jvp", forward_mode
    yield "jvp, freed", lambda: forward_mode(reshard_after_forward=True)
    yield "vmap", lambda: torch.vmap(sharded(api))(torch.stack([X, -X])).tolist()
    yield "grad", lambda: torch.func.grad(lambda x: model(x).sum())(X).tolist()


def composed(api: Any) -> Programs:
    around, inside, model = layers(), layers(), sharded(api)
    yield "around", lambda: api.fully_shard(around[0]) and stepped(replicate(around))
    yield "inside", lambda: replicate(inside[0]) and stepped(api.fully_shard(inside))
    yield "both", lambda: replicate(sharded(api))
    yield "names", lambda: [repr(model), type(model[:1]).__name__, list(model.state_dict())]
    yield "int for a setter", lambda: model.set_reshard_after_forward(2)
    yield "no such method", lambda: api.register_fsdp_forward_method(model, "encode")
    yield "unshard", lambda: [model.unshard(), kinds(model), model.reshard(), kinds(model)]
    again = partial(checkpoint, model, use_reentrant=False)
    yield "checkpointing", lambda: stepped(model, again)
    yield "two forwards", lambda: stepped(model, lambda x: model(x) + model(2 * x))
    for flag in (False, True):
        model.set_requires_gradient_sync(flag)
        yield f"backward {flag}", lambda: model(X).sum().backward() or seen(model)
    yield "double", lambda: sharded(api).double()(X.double()).tolist()


def different(api: Any) -> Programs:
    """The rows of the table, in its order."""
    model, part, whole, ran = api.fully_shard(layers()), sharded(api), sharded(api), layers()
    loss = model(X).sum()
    yield "classes of `parameters()` between forward and backward", partial(kinds, model)
    grad = partial(torch.autograd.grad, loss)
    yield "`torch.autograd.grad` of them", lambda: grad([*model.parameters()])
    yield "weights kept after backward, after a step", lambda: reused(sharded(api))
    yield "`zero_grad` before a reduction", lambda: cleared(sharded(api))
    yield "a part called before the whole", lambda: part[0](X) is None or trains(part)
    around = partial(trains, ran)
    yield (
        "`fully_shard` around what has run",
        lambda: trains(api.fully_shard(ran[0])) and api.fully_shard(ran) and around(),
    )
    yield "`reset_iter_state` of a part", lambda: trains(whole) and whole[0].reset_iter_state()
    yield "`fully_shard` again", lambda: api.fully_shard(whole)
    yield "`fully_shard` of a part of what is sharded", lambda: api.fully_shard(whole[2])
    yield "`copy.deepcopy`", lambda: copy.deepcopy(whole)
    yield "a lazy parameter", lambda: api.fully_shard(nn.LazyLinear(4))
    yield "an empty list", lambda: api.fully_shard([])
    yield "another object as `mesh`", lambda: api.fully_shard(layers(), mesh=3)
    yield "`mp_policy=None`", lambda: trains(api.fully_shard(layers(), mp_policy=None))
    mesh = init_device_mesh("cpu", (1, 2))
    yield "a mesh of two dims without names", lambda: api.fully_shard(layers(), mesh=mesh)
    yield "`param_dtype=torch.int32`", lambda: api.MixedPrecisionPolicy(torch.int32)
    yield "`set_gradient_divide_factor(0)`", lambda: whole.set_gradient_divide_factor(0)
    off = whole[0].set_unshard_in_backward
    yield "`set_unshard_in_backward(False)` of a `Linear`", partial(off, False)
    tied = layers()
    tied[2].weight = tied[0].weight
    yield "a tied weight in two calls", lambda: api.fully_shard(tied[0]) and api.fully_shard(tied)
    waves = layers(dtype=torch.complex64)
    yield "complex parameters", lambda: api.fully_shard(waves)
    yield "a layer added after `fully_shard`", lambda: trains(sharded(api).append(nn.Linear(4, 4)))
    table = nn.Embedding(4, 4, max_norm=1.0)
    yield "`Embedding(max_norm=1.0)`, which writes to its weight", lambda: api.fully_shard(table)
    eights = torch.ones(4, 4).to(torch.float8_e4m3fn)
    frozen = nn.Embedding(4, 4, _weight=eights, _freeze=True)
    yield "float8 alone in a unit, on gloo", lambda: api.fully_shard(frozen).unshard()
    carried = nn.Linear(4, 4, bias=False)
    carried.weight = nn.Parameter(Carried(torch.ones(4, 4)))
    yield "a parameter with `fsdp_pre_all_gather`", lambda: trains(api.fully_shard(carried))
    yield "a view as output, written to", lambda: views(api)


class Scale(torch.autograd.Function):
    """A view whose backward needs a weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient * ctx.saved_tensors[0][:, 0], None


class Scaled(nn.Linear):
    """A layer that ends with such a view."""

    def forward(self, x: torch.Tensor) -> Any:
        return Scale.apply(super().forward(x), self.weight)  # type: ignore[no-untyped-call]


def views(api: Any) -> str:
    """Train with a view as a unit's output: one that an own function gives, and one written to."""
    flat = api.fully_shard(layers().append(nn.Flatten(0)), reshard_after_forward=True)
    trains(api.fully_shard(Scaled(4, 4), reshard_after_forward=True))
    return trains(nn.Sequential(flat, nn.ReLU(inplace=True)))


def reused(model: Any) -> str:
    model.set_reshard_after_backward(False)
    losses, *_ = stepped(model)
    return "used again" if losses[0] == losses[1] else "gathered anew"


def cleared(model: Any) -> str:
    trains(model)
    once = seen(model)
    model.set_requires_gradient_sync(False)
    trains(model)
    model.zero_grad()
    model.set_requires_gradient_sync(True)
    trains(model)
    return "clears what waits" if seen(model) == once else "leaves what waits"


def outcomes(ctx: Context, group: str) -> list[dict[str, Any]]:
    """Of each program of a group, PyTorch's and ours."""
    warnings.filterwarnings("error", ".*returned a view")
    apis = map(importlib.import_module, (THEIRS, OURS))
    return [{what: outcome(do) for what, do in globals()[group](api)} for api in apis]


GROUPS = (options, parameters, transforms, composed)
REFUSED = (
    "reshard 3, reshard yes, on meta, no module, container, both, int for a setter, no such method"
)


@pytest.mark.parametrize(
    ("group", "size"), [*((group.__name__, 2) for group in GROUPS), ("options", 3), ("options", 4)]
)
def test_everyday_programs_do_the_same_to_the_bit(worlds: Worlds, group: str, size: int):
    refused = REFUSED.replace("reshard 3", "reshard 2") if size == 3 else REFUSED
    for theirs, ours in worlds.world(size, parse("solution")).run(outcomes, group):
        assert ours == theirs
        errors = [what for what, found in theirs.items() if isinstance(found, str)]
        assert errors == [what for what in theirs if what in refused.split(", ")]


def test_the_table_says_what_both_do_where_they_differ(worlds: Worlds):
    text = (REPOSITORY_ROOT / "solution" / "README.md").read_text()
    (table,) = re.findall(r"\| situation \| PyTorch \| here \|\n.*?\n(.*?)\n\n", text, re.DOTALL)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]

    for theirs, ours in worlds.world(2, parse("solution")).run(outcomes, "different"):
        assert [what for what in theirs if theirs[what] == ours[what]] == []
        found = [[what, str(theirs[what]), str(ours[what])] for what in theirs]
        assert [[what, a.replace("`", ""), b.replace("`", "")] for what, a, b in rows] == found


# ------------------------------------------------------------------- names, parameters, defaults


def public() -> dict[str, Any]:
    """What PyTorch offers for `fully_shard`; its older FSDP is in the same place."""
    offered = importlib.import_module(THEIRS)
    newer = importlib.import_module(f"{THEIRS}._fully_shard").__all__
    return {name: getattr(offered, name) for name in offered.__all__ if name in newer}


def listed() -> set[str]:
    """Names in the first column of the README's first table."""
    text = (REPOSITORY_ROOT / "solution" / "README.md").read_text()
    (section,) = re.findall(r"## Where `fully_shard` differs.*?\n(.*?)\n## ", text, re.DOTALL)
    table, _ = section.split("\n| situation |")
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def methods(kind: type) -> dict[str, Any]:
    """Public ones, by name."""
    functions = inspect.getmembers(kind, inspect.isfunction)
    return {name: method for name, method in functions if not name.startswith("_")}


def arguments(function: Any) -> list[tuple[str, Any, str]]:
    """Name, kind and default of each; defaults are compared by what they print."""
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, repr(p.default)) for p in found]


def differences() -> Iterator[str]:
    """Names of PyTorch's that ours lacks or has otherwise."""
    ours = importlib.import_module(OURS)
    for name, their in public().items():
        own = getattr(ours, name, None)
        is_called = inspect.isfunction(their) or dataclasses.is_dataclass(their)
        if own is None or (is_called and arguments(their) != arguments(own)):
            yield name
        elif not is_called:
            for word, method in methods(their).items():
                same = methods(own).get(word)
                if same is None or arguments(method) != arguments(same):
                    yield word


def test_every_name_parameter_and_default_of_pytorchs_is_here_or_in_the_table():
    assert {"fully_shard", "FSDPModule", "register_fsdp_forward_method"} <= public().keys()
    assert len(methods(public()["FSDPModule"])) >= 20

    assert sorted(differences()) == sorted(listed() - OPTIONS)
    assert listed() >= OPTIONS


class Gated(nn.Sequential):
    """Layers with a norm between them that the first rank alone uses."""

    def forward(self, x: torch.Tensor) -> Any:
        first, norm, last = self
        return last(norm(first(x)) if torch.distributed.get_rank() == 0 else first(x))


@on_ranks(2)
def test_a_whole_model_whose_ranks_use_other_parameters_ends_its_step(ctx):
    torch.manual_seed(0)
    model: Any = Gated(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)).to(ctx.device)
    plain = copy.deepcopy(model)
    nn.Sequential.forward(plain, X.to(ctx.device)).square().sum().backward()
    wrapped = ctx.impl.fsdp(model)
    wrapped(X.to(ctx.device)).square().sum().backward()
    wrapped.finish_gradient_synchronization()
    torch.testing.assert_close(model[1].weight.grad, plain[1].weight.grad / 2)


@on_ranks(1)
def test_options_that_are_not_offered_are_refused_by_name(ctx):
    api = importlib.import_module(OURS)
    options: dict[str, Any] = {
        "shard_placement_fn": lambda parameter: Shard(parameter.ndim - 1),
        "offload_policy": type("CPUOffloadPolicy", (api.OffloadPolicy,), {})(),
        "dp_mesh_dims": ("replicate", "shard"),
    }
    assert options.keys() == OPTIONS
    for name, value in options.items():
        with pytest.raises(NotImplementedError, match=rf"^expected (?=.*Linear).*{name}"):
            api.fully_shard(nn.Linear(4, 4, bias=False, device=ctx.device), **{name: value})
    api.fully_shard(nn.Linear(4, 4, device=ctx.device), shard_placement_fn=lambda p: Shard(0))
