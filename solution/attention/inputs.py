"""The inputs of attention, checked once for every algorithm.

Four dims, `[batch, heads, seq, head_dim]`, or three, `[batch, seq, head_dim]`, which are one head.
Under autocast all three tensors take autocast's dtype, as in PyTorch's own attention; otherwise
their dtypes must agree. Errors name the argument and both values.
"""

import math
from typing import Any

import torch

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check(q: Any, k: Any, v: Any) -> None:
    """Check q, k and v.

    Raises:
        ValueError: not tensors of one dtype and device, or shapes that do not fit each other.
    """
    named = {"q": q, "k": k, "v": v}
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"expected {name} to be a tensor, got {type(tensor).__name__}")
    if q.dtype not in DTYPES:
        raise ValueError(f"expected q of a dtype among {_short(*DTYPES)}, got {_short(q.dtype)}")
    for name in ("k", "v"):
        for what in ("dtype", "device"):
            mine, theirs = getattr(named[name], what), getattr(q, what)
            if mine != theirs:
                raise ValueError(
                    f"expected {name} of q's {what}, got q {_short(theirs)} and {name} "
                    f"{_short(mine)}"
                )
    _check_shapes(q, k, v)


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    shapes = f"got q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}"
    if q.ndim not in (3, 4):
        raise ValueError(
            f"expected q of 4 dims [batch, heads, seq, head_dim], or 3 without heads, {shapes}"
        )
    for name, tensor in (("k", k), ("v", v)):
        if tensor.ndim != q.ndim:
            raise ValueError(f"expected {name} with as many dims as q, {shapes}")
        if tensor.shape[0] != q.shape[0]:
            raise ValueError(f"expected {name} with the batch of q, {shapes}")
        if tensor.shape[-1] != q.shape[-1]:
            raise ValueError(f"expected {name} with the head_dim of q, {shapes}")
    if k.shape != v.shape:
        raise ValueError(f"expected k and v of one shape, {shapes}")
    if q.shape[-1] == 0:
        raise ValueError(f"expected q with a head_dim of at least 1, {shapes}")
    if q.ndim == 4 and (q.shape[1] % max(1, k.shape[1]) or (q.shape[1] == 0) != (k.shape[1] == 0)):
        raise ValueError(
            f"expected the heads of k to divide the heads of q, got {k.shape[1]} heads of k and "
            f"{q.shape[1]} heads of q"
        )


def _short(*values: object) -> str:
    return ", ".join(str(value).removeprefix("torch.") for value in values)


def checked_scale(scale: Any, head_dim: int) -> float:
    """`scale` as a float; None is `head_dim ** -0.5`.

    Raises:
        ValueError: not a finite number.
    """
    if scale is None:
        return head_dim**-0.5
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise ValueError(f"expected scale to be a finite number or None, got {scale!r}")
    return float(scale)


def as_4d(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with a head dim: a view."""
    return tensor if tensor.ndim == 4 else tensor.unsqueeze(1)


def under_autocast(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """q, k and v in autocast's dtype where it is on; float64 and what is no float stay."""
    if not isinstance(q, torch.Tensor):
        return q, k, v
    kind = q.device.type
    # `meta` has no autocast, and asking for it is an error. Asking whether it has stops
    # torch.compile of 2.11.
    if q.is_meta or not torch.is_autocast_enabled(kind):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    tensors = [q, k, v]
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, torch.Tensor) and tensor.dtype in DTYPES[:3]:
            tensors[index] = tensor.to(dtype)
    return tensors[0], tensors[1], tensors[2]
