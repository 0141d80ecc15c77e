"""Exact attention in tiles: neither scores nor probabilities exist as a whole.

Problem: softmax(q k^T) v needs [queries, keys] scores, which do not fit for long sequences.

Idea: visit the keys in tiles and keep, per row, a running maximum m, a normaliser and the sum of
p v; when m grows, rescale both. Save only L = m + log(normaliser); backward recomputes the tiles.

Steps
    1. Forward, per tile of queries: for each tile of keys s = scale q k^T, p = exp(s - m), rescale
       and add. O = sum / normaliser.
    2. Backward: delta = sum(O dO) - dL; per tile p = exp(s - L), dP = dO v^T, dS = p (dP - delta),
       dV += p^T dO, dK += dS^T q, dQ += dS k, dK and dQ times scale.
    3. Causal: row i sees keys up to i + K - Q; tiles in which no row sees a key are skipped. A row
       that sees nothing has O = 0 and L = -inf.

Use
    out = flash_attention(q, k, v, causal=True)              # [B, H, Q, D]
    out, lse = flash_attention(q, k, v, return_lse=True)     # lse [B, H, Q]

Cost: O(Q K D) operations, O(Q D) memory beyond the inputs. Sums are float32 (float64 for float64
inputs); P and dS are rounded to the inputs' dtype before they are multiplied, as tensor cores do.

Paper: Dao et al. 2022 and Dao 2023 (FlashAttention and FlashAttention-2).

Legend: B batch, H query heads, G key/value heads, Q queries, K keys, D head dim; a tile is a slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

Tensor = torch.Tensor

TILE_Q = 32
TILE_K = 32


def flash_attention(q, k, v, *, causal=False, scale=None, return_lse=False):
    """Return O, with `return_lse` (O, L); inputs are [B, heads, length, D] or [B, length, D]."""
    check(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    is_flat = q.ndim == 3
    q, k, v = (t.unsqueeze(1) if is_flat else t for t in (q, k, v))
    # Autocast would make the wide products narrow.
    with torch.autocast(q.device.type, enabled=False):
        out, lse = TiledAttention.apply(q, k, v, causal, scale)
    out, lse = (t.squeeze(1) if is_flat else t for t in (out, lse))
    return (out, lse) if return_lse else out


def check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise a ValueError that names the argument if attention is not defined for it."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"expected {name} to be a tensor, got {type(tensor).__name__}")
        if not tensor.is_floating_point() or tensor.ndim not in (3, 4):
            raise ValueError(f"expected {name} of 3 or 4 floating dims, got {tensor.dtype}")
        if (tensor.dtype, tensor.device, tensor.ndim) != (q.dtype, q.device, q.ndim):
            raise ValueError(f"expected {name} like q {q.dtype}, {q.device}, got {tensor.dtype}")
    if k.shape != v.shape:
        raise ValueError(f"expected v of k's shape {tuple(k.shape)}, got {tuple(v.shape)}")
    if k.shape[0] != q.shape[0] or k.shape[-1] != q.shape[-1]:
        raise ValueError(f"expected q and k alike, got q {tuple(q.shape)}, k {tuple(k.shape)}")
    if q.ndim == 4 and (k.shape[1] == 0) != (q.shape[1] == 0):
        raise ValueError(f"expected heads of k, got q {tuple(q.shape)}, k {tuple(k.shape)}")
    if q.ndim == 4 and k.shape[1] and q.shape[1] % k.shape[1]:
        raise ValueError(f"expected k heads to divide {q.shape[1]} q heads, got {k.shape[1]}")


class TiledAttention(torch.autograd.Function):
    """The autograd node: forward keeps L, and backward recomputes each tile from it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Any:
        out, lse = forward(q, k, v, causal, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = causal, scale
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dl: Tensor | None) -> Any:
        found = backward(ctx.saved_tensors, do, dl, *ctx.options)
        wanted = ctx.needs_input_grad[:3]
        return *(g if needed else None for g, needed in zip(found, wanted, strict=True)), None, None


# ------------------------------------------------------------------------------------------- tiles


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b with wide sums; `a` may be a wide P or dS, and is rounded to b's dtype."""
    return a.to(b.dtype).to(wide(b.dtype)) @ b.to(wide(b.dtype))


def key_head_of(q: Tensor, k: Tensor) -> Tensor:
    """Return [H], the key head that each query head reads."""
    heads, kv_heads = q.shape[1], k.shape[1]
    return torch.arange(heads, device=q.device) // max(1, heads // max(1, kv_heads))


def tiles(num: int, size: int) -> list[slice]:
    """Return [0, num) in tiles; four times as large where there would be hundreds of them."""
    size = size if num <= 256 else 4 * size
    return [slice(i, min(i + size, num)) for i in range(0, num, size)]


def tiles_seen(rows: slice, q: Tensor, k: Tensor, causal: bool) -> list[slice]:
    """Return the tiles of keys of which at least one of these rows sees a key."""
    end = rows.stop + k.shape[2] - q.shape[2] if causal else k.shape[2]
    return [keys for keys in tiles(k.shape[2], TILE_K) if keys.start < end]


def scores(q: Tensor, k: Tensor, rows: slice, keys: slice, causal: bool, scale: float) -> Tensor:
    """Return s [B, H, rows, keys] of one tile, -inf where a row does not see a key."""
    s = dot(q[:, :, rows], k[:, :, keys].transpose(-1, -2)) * scale
    if not causal:
        return s
    last = torch.arange(rows.start, rows.stop, device=q.device) + k.shape[2] - q.shape[2]
    key = torch.arange(keys.start, keys.stop, device=q.device)
    return s.masked_fill(key > last[:, None], -torch.inf)


# ------------------------------------------------------------------------------- forward, backward


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return O [B, H, Q, D] in q's dtype and L [B, H, Q], natural logarithm, in wide."""
    heads = key_head_of(q, k)
    k, v = k[:, heads], v[:, heads]
    out = q.new_zeros(q.shape)
    lse = q.new_full(q.shape[:-1], -torch.inf, dtype=wide(q.dtype))
    for rows in tiles(q.shape[2], TILE_Q):
        acc = q.new_zeros(q[:, :, rows].shape, dtype=wide(q.dtype))
        m, norm = torch.full_like(acc[..., 0], -torch.inf), torch.zeros_like(acc[..., 0])
        for keys in tiles_seen(rows, q, k, causal):
            s = scores(q, k, rows, keys, causal, scale)
            new = torch.maximum(m, s.amax(dim=-1))
            # -inf - (-inf) would be NaN in a row that has seen nothing yet.
            safe = new.masked_fill(new == -torch.inf, 0.0)
            p = torch.exp(s - safe[..., None])
            rescale = torch.exp(m - safe)
            norm = norm * rescale + p.sum(dim=-1)
            acc = acc * rescale[..., None] + dot(p, v[:, :, keys])
            m = new
        out[:, :, rows] = acc / norm.masked_fill(norm == 0.0, 1.0)[..., None]
        lse[:, :, rows] = m + torch.log(norm)
    return out, lse


def backward(
    saved: Sequence[Tensor], do: Tensor | None, dl: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dQ, dK and dV in the inputs' shapes and dtypes; a `do` or `dl` of None is zero."""
    q, k, v, out, lse = saved
    do = torch.zeros_like(out) if do is None else do
    # The sum of o do is what the softmax's Jacobian subtracts from each dP of a row. L's own
    # gradient enters a row in the same way, since dL/ds = p.
    delta = (out.to(wide(q.dtype)) * do.to(wide(q.dtype))).sum(dim=-1)
    delta = delta if dl is None else delta - dl
    # With L = -inf the exponential would overflow in rows that see nothing; +inf makes them zero.
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    heads = key_head_of(q, k)
    k_read, v_read = k[:, heads], v[:, heads]
    dq, dk, dv = (t.new_zeros(t.shape, dtype=wide(q.dtype)) for t in (q, k_read, v_read))
    for rows in tiles(q.shape[2], TILE_Q):
        for keys in tiles_seen(rows, q, k, causal):
            s = scores(q, k_read, rows, keys, causal, scale)
            p = torch.exp(s - lse[:, :, rows, None])
            dp = dot(do[:, :, rows], v_read[:, :, keys].transpose(-1, -2))
            ds = p * (dp - delta[:, :, rows, None])
            dv[:, :, keys] += dot(p.transpose(-1, -2), do[:, :, rows])
            dk[:, :, keys] += dot(ds.transpose(-1, -2), q[:, :, rows]) * scale
            dq[:, :, rows] += dot(ds, k_read[:, :, keys]) * scale
    # A key head gathers, in wide, the gradients of the query heads that read it.
    dk, dv = (t.new_zeros(k.shape).index_add_(1, heads, t) for t in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class PlainAttention:
    """What this file offers of the contract."""

    @classmethod
    def functions(cls) -> dict[str, Any]:
        """Return the contract's function."""
        return {"flash_attention": flash_attention}
