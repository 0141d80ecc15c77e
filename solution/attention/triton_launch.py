"""FlashAttention by Triton: what the kernels are given, where they run, what users call.

    flash_attention_triton(q, k, v, causal=True)        a function, like `flash_attention`
    FlashAttentionTriton.apply(q, k, v, True)           a class, like `FlashAttentionTorch`

On a CUDA device the kernels of `solution.attention.triton_kernels` and `.triton_backward` are
compiled on first use, once per head dim, dtype, mask and heads per key head. On a CPU they run in
Triton's interpreter, with TRITON_INTERPRET=1 in the environment before they are imported: slow, and
exact enough to test them (float32 products are whole there, not TF32). Without Triton everything
else works.

The launcher arranges what a kernel relies on:
- the last stride is 1, and an offset within a tile fits 32 bits; what is not so is copied;
- scale is positive: a negative one gives its sign to q, which is exact, and zero makes q zero;
- a grid has one axis: the other two end at 65535.

Legend: B batch, H heads, G key/value heads, Q queries, K keys, D head dim.
"""

import functools
import importlib
import math
from importlib.util import find_spec
from typing import Any

import torch

from solution.attention.flash import Tensors2, Tensors3, call, function_class, register
from solution.attention.tiles import LARGEST_TILE, choose, delta_queries, padded

LOG2E = math.log2(math.e)
SMALLEST_SCALE = 2.0**-126  # of float32's full precision; what is below makes no score but zero
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def triton_forward(
    q_BHQD: torch.Tensor, k_BGKD: torch.Tensor, v_BGKD: torch.Tensor, *, causal: bool, scale: float
) -> Tensors2:
    """As `tiled_forward`, in one kernel.

    Raises:
        ValueError: a dtype, a head dim or a device that the kernels have not.
    """
    _check(q_BHQD)
    q, k, v = map(_rows, (q_BHQD, k_BGKD, v_BGKD))
    q, _, scale = _positive(q, scale)
    batch, heads, num_queries, _ = q.shape
    out, lse = q.new_empty(q_BHQD.shape), q.new_empty(q.shape[:3], dtype=torch.float32)
    settings, tiles = _settings("forward", q, k, causal=causal)
    num_programs = math.ceil(num_queries / tiles.queries) * batch * heads
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    sizes = (heads, num_queries, k.shape[2])
    _launch(
        "forward_kernel", num_programs, q, k, v, out, lse, *strides, *sizes, scale * LOG2E,
        **settings,
    )  # fmt: skip
    return out, lse


def triton_backward(
    dout_BHQD: torch.Tensor,
    dlse_BHQ: torch.Tensor | None,
    q_BHQD: torch.Tensor,
    k_BGKD: torch.Tensor,
    v_BGKD: torch.Tensor,
    out_BHQD: torch.Tensor,
    lse_BHQ: torch.Tensor,
    *,
    causal: bool,
    scale: float,
    wants_q: bool = True,
    wants_kv: bool = True,
) -> Tensors3:
    """As `tiled_backward`, in up to three kernels: what is not wanted is not launched."""
    q, k, v, dout = map(_rows, (q_BHQD, k_BGKD, v_BGKD, dout_BHQD))
    q, sign, scale = _positive(q, scale)
    batch, heads, num_queries, _ = q.shape
    delta, lse2 = _statistics(dout, dlse_BHQ, out_BHQD, lse_BHQ)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3])
    rest = (*strides, heads, num_queries, k.shape[2], scale, scale * LOG2E)
    dq = dk = dv = q.new_empty(0)
    if wants_kv:
        dk, dv = k.new_empty(k_BGKD.shape), v.new_empty(v_BGKD.shape)
        settings, tiles = _settings("dkdv", q, k, causal=causal)
        num_programs = math.ceil(k.shape[2] / tiles.keys) * batch * k.shape[1]
        tensors = (q, k, v, dout, lse2, delta, dk, dv)
        _launch("dkdv_kernel", num_programs, *tensors, *rest, **settings)
    if wants_q:
        dq = q.new_empty(q_BHQD.shape)
        settings, tiles = _settings("dq", q, k, causal=causal)
        num_programs = math.ceil(num_queries / tiles.queries) * batch * heads
        _launch("dq_kernel", num_programs, q, k, v, dout, lse2, delta, dq, *rest, **settings)
        if sign != 1:
            dq.mul_(sign)
    return dq, dk if wants_kv else q.new_empty(0), dv


def _statistics(
    dout: torch.Tensor, dlse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor
) -> Tensors2:
    """delta and the LSE in base 2, one number per query each."""
    out, lse = out.contiguous(), lse.contiguous()  # as they left the forward, in eager mode
    delta, lse2 = torch.empty_like(lse), torch.empty_like(lse)
    batch, heads, num_queries, head_dim = out.shape
    tile = delta_queries(padded(head_dim))
    _launch(
        "delta_kernel", math.ceil(num_queries / tile) * batch * heads,
        dout, out, lse, lse if dlse is None else dlse.contiguous(), delta, lse2,
        *dout.stride()[:3], heads, num_queries,
        HEAD_DIM=head_dim, DIMS=padded(head_dim), TILE_Q=tile, HAS_DLSE=dlse is not None,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return delta, lse2


def _settings(
    kernel: str, q: torch.Tensor, k: torch.Tensor, *, causal: bool
) -> tuple[dict[str, Any], Any]:
    """Return the constants that a kernel is compiled for, and its tiles."""
    head_dim, dims = q.shape[-1], padded(q.shape[-1])
    tiles = choose(kernel, dims, q.dtype, interpreted=_is_interpreted())
    compiled_for = {
        "GROUP": max(1, q.shape[1] // max(1, k.shape[1])),
        "HEAD_DIM": head_dim,
        "DIMS": dims,
        "TILE_Q": tiles.queries,
        "TILE_K": tiles.keys,
        "CAUSAL": causal,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        "enable_fp_fusion": True,  # a score is one multiply-add; off by default from Triton 3.10
    }
    return compiled_for, tiles


def _launch(name: str, num_programs: int, *args: Any, **settings: Any) -> None:
    if num_programs:
        with torch.cuda.device_of(args[0]):  # Triton launches on the current device
            _kernels()[name][(num_programs,)](*args, **settings)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a copy where a kernel could not walk its rows."""
    can_walk = tensor.stride(-1) == 1 and tensor.stride(2) < 2**31 // LARGEST_TILE
    return tensor if can_walk else tensor.contiguous()


def _positive(q: torch.Tensor, scale: float) -> tuple[torch.Tensor, int, float]:
    """q, a sign and a positive scale, with the product of q and scale as it was."""
    if scale >= SMALLEST_SCALE:
        return q, 1, scale
    if scale <= -SMALLEST_SCALE:
        return q.neg(), -1, -scale
    return torch.zeros_like(q, memory_format=torch.contiguous_format), 0, 1.0


# ----------------------------------------------------------------------------- where kernels run


@functools.cache
def _kernels() -> dict[str, Any]:
    """The kernels by name; Triton is imported here, and with the environment of now."""
    found: dict[str, Any] = {}
    for module in ("triton_kernels", "triton_backward"):
        found |= vars(importlib.import_module(f"solution.attention.{module}"))
    return {name: kernel for name, kernel in found.items() if name.endswith("_kernel")}


@functools.cache
def _is_interpreted() -> bool:
    triton = importlib.import_module("triton")
    is_interpreted = not isinstance(_kernels()["forward_kernel"], triton.runtime.JITFunction)
    if is_interpreted:
        _mend_interpreter()
    return is_interpreted


def _mend_interpreter() -> None:
    """Let kernels count: Triton 3.6 takes an array of one element for a number, NumPy 2.4 not."""
    module: Any = importlib.import_module("triton.runtime.interpreter")
    patch = getattr(module, "_patch_lang_tensor", None)
    if patch is None:
        return

    def patch_and_mend(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    module._patch_lang_tensor = patch_and_mend


def unavailable(device_type: str) -> str | None:
    """Return why the kernels cannot run on tensors of that device; None if they can."""
    if find_spec("triton") is None:
        return "Triton is not installed (`pip install triton`, Linux only)"
    if device_type == "cuda" or (device_type == "cpu" and _is_interpreted()):
        return None
    return (
        f"Triton compiles for CUDA devices, and got {device_type}; on a CPU its interpreter runs "
        "the kernels, slowly, where TRITON_INTERPRET=1 was set before Python started"
    )


def _check(q: torch.Tensor) -> None:
    reason = unavailable(q.device.type)
    if reason is not None:
        raise ValueError(
            f"expected q where Triton runs, got {q.device}: {reason}; the backends 'plain', 'sdpa' "
            "and 'tiled' run here"
        )
    given = str(q.dtype).removeprefix("torch.")
    if q.dtype not in DTYPES:
        raise ValueError(
            f"expected q of float16, bfloat16 or float32, got {given}; backend 'tiled' has float64"
        )
    if q.dtype == torch.bfloat16 and _is_interpreted():
        raise ValueError(
            f"expected q of float16 or float32 in Triton's interpreter, got {given}, of which it "
            "has no arithmetic"
        )
    if q.shape[-1] > 256:
        raise ValueError(f"expected q with a head_dim of at most 256, got {q.shape[-1]}")


# ------------------------------------------------------------------------------- what users call

TRITON = register("triton", triton_forward, triton_backward)


def flash_attention_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`solution.attention.flash.flash_attention` in Triton kernels.

    Arguments, result and errors are the same, but for float16, bfloat16 and float32 only, with a
    head dim of at most 256; on a CPU in Triton's interpreter, without bfloat16.
    """
    return call(TRITON, q, k, v, causal=causal, scale=scale, return_lse=return_lse)


class FlashAttentionTriton(function_class(TRITON)):  # type: ignore[misc]  # a base made by a call
    """`FlashAttentionTriton.apply(q, k, v, is_causal=False) -> out`, as `FlashAttentionTorch`."""
