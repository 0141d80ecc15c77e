"""Clipping by the global gradient norm of replicated and sharded gradients.

Problem. A training loop clips by the norm of the whole gradient. If each rank holds a part of it,
the norm of that part is another number on every rank, and scaling by it makes the parts of one
tensor inconsistent; if ranks hold copies, summing over them counts each element W times.

1. A plain tensor is replicated; a DTensor is divided over those dims of its mesh on which it is not
   replicated.
2. Gradients that are divided over the same ranks add up their |x|^p on each rank; one collective of
   one number per such set of ranks adds those up. Replicated ones need no collective.
3. Gradients are scaled in place by max_norm / norm, if that is less than 1.

So data parallelism sends nothing here, FSDP one number, and both together one number too.

Invariants. All ranks get equal bits, and issue the same collectives whatever the values: these
follow from the parameters, not from which gradients exist. NaN on one rank is NaN on all.

Cost. One pass over the gradients for the norm, one for the scaling.

Paper: Pascanu et al. 2013, "On the difficulty of training recurrent neural networks". PyTorch
counterpart: `torch.nn.utils.clip_grad_norm_`, which refuses plain tensors beside DTensors. For
p = inf it raises on ranks with an empty shard, and returns a DTensor whose `.item()` is this rank's
own maximum.
Left out: mesh dims that divide one tensor twice cost a collective each.
"""

import functools
import math
from collections.abc import Iterable, Sequence

import torch
from torch.distributed.tensor import DTensor

from solution import comm

Tensors = torch.Tensor | Iterable[torch.Tensor]
_ADDED_UP_AT_ONCE = 2**14  # elements


def clip_grad_norm_(
    parameters: Tensors,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients in place, so that their global norm is at most `max_norm`.

    Call it once per step on all ranks, after gradients have been reduced, with the same parameters.

    Args:
        parameters: plain or DTensor; those without `.grad` are skipped.
        norm_type: p of the p-norm: above 0, or inf.
        error_if_nonfinite: raise, on all ranks, instead of scaling by NaN or zero.

    Returns:
        The norm before clipping, a plain tensor without dims, equal on all ranks.

    Raises:
        ValueError: max_norm or norm_type out of range, or a gradient that is not reduced yet.
        RuntimeError: the norm is not finite and `error_if_nonfinite`; gradients are untouched.
    """
    if not max_norm >= 0:  # also refuses NaN
        raise ValueError(f"expected max_norm >= 0, got {max_norm}")
    tensors = _listed(parameters)
    norm = total_norm(tensors, norm_type)
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(
            f"expected a finite gradient norm, got {norm.item()} (order {norm_type}); nothing was "
            "scaled. Skip this step, or look at its data"
        )
    scale_to_norm_(tensors, max_norm, norm)
    return norm


@torch.no_grad()
def total_norm(parameters: Tensors, norm_type: float = 2.0) -> torch.Tensor:
    """Return the global norm, float32 or float64 as parameters are; all ranks call it."""
    order = float(norm_type)
    if not order > 0:
        raise ValueError(f"expected norm_type > 0 or inf, got {norm_type}")
    tensors = _listed(parameters)
    device = tensors[0].device if tensors else torch.device("cpu")
    divided: dict[tuple[comm.Group, ...], list[torch.Tensor]] = {(): []}
    for tensor in tensors:
        own = divided.setdefault(_divided_over(tensor), [])
        if tensor.grad is not None:
            own.append(_local(tensor.grad))
    parts = []
    for groups, gradients in divided.items():
        part = _local_part(gradients, order).to(device)
        for group in groups:
            reduce_ = comm.max_over_ranks if order == math.inf else comm.sum_over_ranks
            part = reduce_(part, group)
        parts.append(part)
    first, *rest = torch.stack(parts).unbind(1)  # each `[sets of ranks]`, equal on all ranks
    if order != math.inf:
        norm = first.sum().pow(1.0 / order)
    else:
        norm = torch.where(rest[0].any(), math.nan, first.max())
    reals = (t.dtype.to_real() for t in tensors)  # the norm of complex numbers is real
    dtype = functools.reduce(torch.promote_types, reals, torch.float32)
    return norm.to(dtype)


@torch.no_grad()
def scale_to_norm_(parameters: Tensors, max_norm: float, norm: torch.Tensor) -> None:
    """Scale gradients, whose norm is `norm`, in place to at most `max_norm`; sends nothing."""
    gradients: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in _listed(parameters):
        if tensor.grad is not None:
            local = _local(tensor.grad)
            gradients.setdefault((local.device, local.dtype), []).append(local)
    # Multiply by 1 rather than branch: a branch would wait for the device.
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for (device, _), alike in gradients.items():
        torch._foreach_mul_(alike, factor.to(device))


def _listed(tensors: Tensors) -> list[torch.Tensor]:
    """Return each tensor once: tied ones would otherwise be counted, and scaled, twice."""
    found = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    return list(dict.fromkeys(found))


def _divided_over(tensor: torch.Tensor) -> tuple[comm.Group, ...]:
    """Return the groups of ranks that hold other elements of this gradient."""
    # Without a gradient on this rank, take the layout of those on others: the parameter's.
    layout = tensor if tensor.grad is None else tensor.grad
    if not isinstance(layout, DTensor):
        return ()
    mesh = layout.device_mesh
    if any(placement.is_partial() for placement in layout.placements):
        raise ValueError(
            f"expected gradients that are reduced, got one of shape {tuple(layout.shape)} with "
            f"placements {layout.placements}; finish the reduction first"
        )
    return tuple(
        mesh.get_group(axis)
        for axis, placement in enumerate(layout.placements)
        if not placement.is_replicate() and mesh.size(axis) > 1
    )


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _local_part(gradients: Sequence[torch.Tensor], order: float) -> torch.Tensor:
    """Return this rank's part, in float64: [sum of |x|^p], or [largest |x|, whether one is NaN].

    A maximum over ranks may lose a NaN, a sum does not.
    """
    is_largest = order == math.inf
    filled = [gradient for gradient in gradients if gradient.numel()]
    if not filled:
        device = gradients[0].device if gradients else None
        return torch.zeros(1 + is_largest, dtype=torch.float64, device=device)
    norms = torch.stack([norm.to(filled[0].device) for norm in _norms(filled, order)])
    if not is_largest:
        return norms.pow(order).sum().reshape(1)
    return torch.stack([norms.nan_to_num(0.0, math.inf).max(), norms.isnan().any().double()])


def _norms(gradients: Sequence[torch.Tensor], order: float) -> list[torch.Tensor]:
    """Return norms, in float64, whose own p-norm is that of all elements.

    On a CPU PyTorch adds up all squares of a tensor in a few float32 accumulators: of 38 million
    elements its norm is 0.3 % too small. Norms of pieces are right, and take hardly longer.
    """
    norms: list[torch.Tensor] = []
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        alike = [gradient for gradient in gradients if gradient.dtype == dtype]
        wide = torch.promote_types(dtype, torch.float32)
        if alike[0].device.type == "cpu":
            alike = [piece for g in alike for piece in g.flatten().split(_ADDED_UP_AT_ONCE)]
        norms.extend(torch._foreach_norm(alike, order, dtype=wide))
    return [norm.double() for norm in norms]
