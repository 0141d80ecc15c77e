"""Gradients in every layout in which training leaves them, made of known integers.

A layout says of each parameter how its gradient lies on the ranks: "plain" (replicas, after data
parallelism), "shard" (a DTensor divided on dim 0, after FSDP), "columns" (on dim 1, after tensor
parallelism), "replicate" (a DTensor that all ranks hold), "hybrid" (divided inside a node,
replicated between nodes), "across" (divided between nodes, replicated inside), "line" (divided over
all ranks, also where others are on a mesh of two dims), "none". The whole gradient is a function of
the name, so the parent knows what is right.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from spec_tests.programs.laws import refusal
from spec_tests.rig.judge.oracle import Named
from spec_tests.rig.judge.tolerance import Tolerance, rounding
from spec_tests.rig.ranks.rank import Context

SHAPES = {"a": (7, 3), "b": (5, 2), "c": (6,), "d": (1, 3)}

SHARDED = dict.fromkeys("abc", "shard")
COLUMNS = dict.fromkeys("ab", "columns")
EMPTY_SHARDS = dict.fromkeys("abcd", "shard")  # of "d" only the first rank has anything
PLAIN = dict.fromkeys("abcd", "plain")
MIXED = {"a": "shard", "b": "plain", "c": "shard", "d": "plain"}
HYBRID = {"a": "hybrid", "b": "hybrid", "c": "replicate"}
TWO_MESHES = {"a": "hybrid", "b": "line", "c": "line"}  # as of experts, and of dense weights
TWO_OF_ONE_SIZE = {"a": "hybrid", "b": "across", "c": "across"}

Layout = Mapping[str, str]


def whole(name: str, scale: float = 1.0) -> torch.Tensor:
    """The whole gradient of a parameter: integers from -9 to 8 without 0, times `scale`."""
    generator = torch.Generator().manual_seed(ord(name))
    sizes = torch.randint(1, 10, SHAPES[name], generator=generator)
    signs = torch.randint(0, 2, SHAPES[name], generator=generator) * 2 - 1
    return (sizes * signs).clamp(max=8).float() * scale  # the largest is negative


def norm(layout: Layout, order: float = 2.0, scale: float = 1.0) -> torch.Tensor:
    """The norm of all of them together."""
    every = [whole(name, scale).reshape(-1) for name, how in layout.items() if how != "none"]
    flat = torch.cat([torch.zeros(1), *every])  # there may be none
    return torch.linalg.vector_norm(flat.double(), order)


def within() -> Tolerance:
    """Sums of fewer than 64 terms, roots and powers of them, in any order."""
    return rounding(torch.float32, terms=64)


def parameters(ctx: Context, layout: Layout, scale: float = 1.0) -> dict[str, nn.Parameter]:
    """Parameters with their gradients, as this rank has them."""
    mesh = None
    if {"hybrid", "both"} & {*layout.values()}:
        mesh = ctx.mesh((2, ctx.world_size // 2))
    elif {"shard", "columns", "replicate"} & {*layout.values()}:
        mesh = ctx.mesh((ctx.world_size,))
    other = None
    if "line" in layout.values():
        other = ctx.mesh((ctx.world_size,))
    elif "across" in layout.values():
        other = ctx.mesh((ctx.world_size // 2, 2), by_column=True)
    found = {}
    for name, how in layout.items():
        gradient = _laid_out(whole(name, scale), how, other if how in ("line", "across") else mesh)
        found[name] = nn.Parameter(torch.zeros_like(gradient))
        if how != "none":
            found[name].grad = gradient
    return found


def _laid_out(tensor: torch.Tensor, how: str, mesh: DeviceMesh | None) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    if mesh is None or how in ("plain", "none"):
        # By columns, as autograd leaves some: to flatten such a gradient is to copy it.
        return tensor.t().contiguous().t()
    if how == "both":
        return distribute_tensor(tensor, mesh, [Shard(0), Shard(1)], src_data_rank=None)
    divided: Replicate | Shard = Replicate() if how == "replicate" else Shard(_dim(how))
    placements = [*[Replicate()] * (mesh.ndim - 1), divided]
    local = tensor
    if how != "replicate":
        parts = tensor.chunk(mesh.size(mesh.ndim - 1), _dim(how))
        rank = mesh.get_local_rank(mesh.ndim - 1)
        local = (parts[rank] if rank < len(parts) else tensor.narrow(_dim(how), 0, 0)).clone()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _dim(how: str) -> int:
    return int(how == "columns")


def clip(
    ctx: Context,
    layout: Layout,
    *,
    max_norm: float = math.inf,
    order: float = 2.0,
    scale: float = 1.0,
    poisoned: int | None = None,
    poison: float = math.nan,
    frozen: str = "",
    **options: Any,
) -> dict[str, Any]:
    """Rank body: the norm that is returned, the whole gradients afterwards, and what was sent.

    Args:
        poisoned: the rank whose part of "a" holds `poison`.
        frozen: the parameter that was frozen after its backward.
    """
    made = parameters(ctx, layout, scale)
    for parameter in (made[name] for name in made if name == frozen):
        parameter.requires_grad_(False)
    if ctx.rank == poisoned:
        local_part(made["a"])[0] = poison
    error = ""
    returned: Any = torch.tensor(0.0)
    with ctx.recording() as recorder:
        try:
            returned = ctx.impl.clip_grad_norm_(made.values(), max_norm, order, **options)
        except refusal.NO_ANSWERS:
            raise
        except RuntimeError as caught:
            if not options:
                raise
            error = f"{type(caught).__name__}: {caught}"
    return {
        "kind": type(returned).__name__,
        "norm": torch.as_tensor(returned).detach().double().reshape(()),
        "error": error,
        "log": recorder.log(),
        "gradients": {name: gathered(p) for name, p in made.items()},
    }


def local_part(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's part of a gradient, to be written to."""
    assert parameter.grad is not None
    gradient: Any = parameter.grad
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def gathered(parameter: nn.Parameter) -> torch.Tensor | None:
    """The whole gradient, put together again."""
    gradient: Any = parameter.grad
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def local_norms(layout: Layout, size: int, order: float = 2.0) -> list[Named]:
    """What each rank would get from its own part alone: a wrong norm that has a name."""
    found = []
    for rank in range(size):
        own = [_own(whole(n), how, rank, size).reshape(-1) for n, how in layout.items()]
        flat = torch.cat([torch.zeros(1), *own])
        found.append({"norm": torch.linalg.vector_norm(flat.double(), order)})
    return found


def _own(tensor: torch.Tensor, how: str, rank: int, size: int) -> torch.Tensor:
    """The part of a rank of `size`, on a mesh of 2 x size / 2 where that has two dims."""
    empty = tensor[:0]
    inside = size // 2
    if how == "none":
        return empty
    if how == "both":
        half = tensor.chunk(2)[rank // inside]
        return half.chunk(inside, 1)[rank % inside]
    over_all = (rank, size)
    divisions = dict.fromkeys(("shard", "columns", "line"), over_all)
    divisions |= {"hybrid": (rank % inside, inside), "across": (rank // inside, 2)}
    number, of = divisions.get(how, (0, 1))
    parts = tensor.chunk(of, _dim(how))
    return parts[number] if number < len(parts) else empty


def mistakes(layout: Layout, size: int, order: float) -> list[tuple[str, list[Named] | Named]]:
    """Wrong norms that have a name: what was done, and what that gives."""
    local, kinds = local_norms(layout, size, order), {*layout.values()} - {"none"}
    found: list[tuple[str, list[Named] | Named]] = [("the norm of the rank's own part", local)]
    if order != 2:
        found.append(("norm_type is left aside: this is the 2-norm", {"norm": norm(layout)}))
    if len(kinds) > 1:
        parts = [{n: how for n, how in layout.items() if how == kind} for kind in kinds]
        added = torch.stack([norm(part, order) for part in parts]).sum()
        found.append(("norms of gradients that lie in different ways were added", {"norm": added}))
    if math.isinf(order):
        return found
    norms = torch.stack([each["norm"] for each in local])
    if kinds - {"shard", "columns", "both"}:
        every = norms.pow(order).sum() ** (1 / order)
        found.append(("what several ranks hold counted once for each of them", {"norm": every}))
    elif order != 1:
        found.append(("the ranks' norms were added, not their p-th powers", {"norm": norms.sum()}))
    if kinds in ({"hybrid", "line"}, {"hybrid", "across"}):
        first, inside = next(iter(layout.values())), size // 2
        group = [{"hybrid": r // inside, "across": r % inside}.get(first, 0) for r in range(size)]
        peers = [torch.tensor([group[r] == each for r in range(size)]) for each in group]
        over_first = [{"norm": norms[own].pow(order).sum() ** (1 / order)} for own in peers]
        found.append(("summed over the ranks of the first one's mesh alone", over_first))
    if "hybrid" in kinds:
        copies = {name: how for name, how in layout.items() if how == "hybrid"}
        twice = norm(layout, order) ** order + norm(copies, order) ** order
        found.append(("summed over replicas, too", {"norm": twice ** (1 / order)}))
    return found
