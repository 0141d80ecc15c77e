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
    attend = PlainAttention()
    out = attend(q, k, v, causal=True)              # [B, H, Q, D]
    out, lse = attend(q, k, v, return_lse=True)     # lse [B, H, Q]

Cost: O(Q K D) operations, O(Q D) memory beyond the inputs. Sums are float32 (float64 for float64
inputs); P and dS are rounded to the inputs' dtype before they are multiplied, as tensor cores do.

Paper: Dao et al. 2022 and Dao 2023 (FlashAttention and FlashAttention-2).

Legend: B batch, H query heads, G key/value heads, Q queries, K keys, D head dim; a tile is a slice.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.autograd.function import once_differentiable

Tensor = torch.Tensor


class PlainAttention:
    """One decision per method; state lives in the arguments."""

    tile_q = 32
    tile_k = 32
    has_second_derivative = False
    saves_by_attribute = False
    saves_copy_of_lse = False

    # --------------------------------------------------------------------------------- the call

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        causal = options.get("causal", False)
        self.check(q, k, v)
        scale = self.scale_of(options.get("scale"), q.shape[-1])
        is_flat = q.ndim == 3
        q, k, v = (t.unsqueeze(1) if is_flat else t for t in (q, k, v))
        out, lse = self.apply(q, k, v, causal, scale)
        out, lse = (t.squeeze(1) if is_flat else t for t in (out, lse))
        return (out, lse) if options.get("return_lse") else out

    def apply(self, *args: Any) -> tuple[Tensor, Tensor]:
        node = _TiledTwice if self.has_second_derivative else _Tiled
        with self.cast(args[0]):
            found: tuple[Tensor, Tensor] = node.apply(self, *args)  # type: ignore[no-untyped-call]  # torch leaves it bare
        return found

    def cast(self, q: Tensor) -> contextlib.AbstractContextManager[Any]:
        """Autocast as the inside sees it: products of wide numbers stay wide."""
        return torch.autocast(q.device.type, enabled=False)

    def returned(self, found: tuple[Any, ...], needed: tuple[bool, ...]) -> list[Any]:
        """What the node hands to autograd of dQ, dK and dV."""
        return [g if is_needed else None for g, is_needed in zip(found, needed, strict=True)]

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if not isinstance(tensor, Tensor):
                raise ValueError(f"expected {name} to be a tensor, got {type(tensor).__name__}")
            if not tensor.is_floating_point() or tensor.ndim not in (3, 4):
                raise ValueError(f"expected {name} of 3 or 4 floating dims, got {tensor.dtype}")
            if (tensor.dtype, tensor.device, tensor.ndim) != (q.dtype, q.device, q.ndim):
                raise ValueError(
                    f"expected {name} like q {q.dtype}, {q.device}, got {tensor.dtype}"
                )
        if k.shape != v.shape:
            raise ValueError(f"expected v of k's shape {tuple(k.shape)}, got {tuple(v.shape)}")
        if k.shape[0] != q.shape[0] or k.shape[-1] != q.shape[-1]:
            raise ValueError(f"expected q and k alike, got q {tuple(q.shape)}, k {tuple(k.shape)}")
        if q.ndim == 4 and (k.shape[1] == 0) != (q.shape[1] == 0):
            raise ValueError(f"expected heads of k, got q {tuple(q.shape)}, k {tuple(k.shape)}")
        if q.ndim == 4 and k.shape[1] and q.shape[1] % k.shape[1]:
            raise ValueError(f"expected k heads to divide {q.shape[1]} q heads, got {k.shape[1]}")

    def scale_of(self, scale: float | None, head_dim: int) -> float:
        return head_dim**-0.5 if scale is None else scale

    # ----------------------------------------------------------------------- arithmetic, layout

    def wide(self, dtype: torch.dtype) -> torch.dtype:
        """In which dtype sums are kept."""
        return torch.float64 if dtype == torch.float64 else torch.float32

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        """a @ b with wide sums."""
        wide = self.wide(a.dtype)
        return a.to(wide) @ b.to(wide)

    def narrow(self, p: Tensor, dtype: torch.dtype) -> Tensor:
        """P and dS as they enter a product."""
        return p.to(dtype)

    def kv_heads_of(self, heads: int, kv_heads: int) -> Tensor:
        """[H], the key head that each query head reads."""
        return torch.arange(heads) // max(1, heads // max(1, kv_heads))

    def visible(self, rows: range, keys: range, shift: int) -> Tensor:
        """Causal: [rows, keys], True where a row sees a key; shift is K - Q."""
        row, key = torch.tensor(list(rows)), torch.tensor(list(keys))
        return key[None, :] <= row[:, None] + shift

    def masked(self, s: Tensor, rows: range, keys: range, shift: int) -> Tensor:
        return s.masked_fill(~self.visible(rows, keys, shift), -torch.inf)

    def q_tiles(self, num: int) -> list[range]:
        return self.tiles(num, self.tile_q)

    def k_tiles(self, num: int) -> list[range]:
        return self.tiles(num, self.tile_k)

    def tiles(self, num: int, size: int) -> list[range]:
        """[0, num) in tiles; four times as large where there would be hundreds of them."""
        size = size if num <= 256 else 4 * size
        return [range(i, min(i + size, num)) for i in range(0, num, size)]

    def is_skipped(self, rows: range, keys: range, shift: int) -> bool:
        """Causal: no row of the tile sees any of its keys."""
        return keys.start > rows[-1] + shift

    def scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        return self.dot(q, k.transpose(-1, -2)) * scale

    # --------------------------------------------------------------------------------- forward

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Any:
        """O [B, H, Q, D] in q's dtype and L [B, H, Q], natural logarithm."""
        heads = self.kv_heads_of(q.shape[1], k.shape[1])
        k, v = k[:, heads], v[:, heads]
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.full(q.shape[:-1], -torch.inf, dtype=self.wide(q.dtype), device=q.device)
        for rows in self.q_tiles(q.shape[2]):
            o, m, norm = self.row_block(q, k, v, rows, causal, scale)
            out[:, :, rows.start : rows.stop] = self.normalised(o, norm).to(q.dtype)
            lse[:, :, rows.start : rows.stop] = self.lse_of(m, norm)
        return out, lse

    def row_block(
        self, q: Tensor, k: Tensor, v: Tensor, rows: range, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sum of p v [.., rows, D], running maximum and normaliser [.., rows] of a tile."""
        q_tile = q[:, :, rows.start : rows.stop]
        shift = k.shape[2] - q.shape[2]
        acc = torch.zeros(q_tile.shape, dtype=self.wide(q.dtype), device=q.device)
        m, norm = self.start(acc[..., 0])
        for keys in self.k_tiles(k.shape[2]):
            if causal and self.is_skipped(rows, keys, shift):
                continue
            s = self.scores(q_tile, k[:, :, keys.start : keys.stop], scale)
            s = self.masked(s, rows, keys, shift) if causal else s
            new = self.maximum(m, s)
            safe = self.safe(new)
            p = torch.exp(s - safe[..., None])
            rescale = torch.exp(m - safe)
            norm = self.rescaled_norm(norm, rescale) + p.sum(dim=-1)
            v_tile = v[:, :, keys.start : keys.stop]
            product = self.dot(self.narrow(p, q.dtype), v_tile)
            acc = self.added(self.rescaled_acc(acc, rescale), product, q.dtype)
            m = new
        return acc, m, norm

    def start(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Running maximum and normaliser before any key."""
        return torch.full_like(like, -torch.inf), torch.zeros_like(like)

    def maximum(self, m: Tensor, s: Tensor) -> Tensor:
        return torch.maximum(m, s.amax(dim=-1))

    def safe(self, m: Tensor) -> Tensor:
        """What is subtracted: -inf - (-inf) would be NaN in a row that has seen nothing yet."""
        return m.masked_fill(m == -torch.inf, 0.0)

    def rescaled_norm(self, norm: Tensor, rescale: Tensor) -> Tensor:
        return norm * rescale

    def rescaled_acc(self, acc: Tensor, rescale: Tensor) -> Tensor:
        return acc * rescale[..., None]

    def added(self, acc: Tensor, product: Tensor, dtype: torch.dtype) -> Tensor:
        return acc + product

    def normalised(self, acc: Tensor, norm: Tensor) -> Tensor:
        return acc / norm.masked_fill(norm == 0.0, 1.0)[..., None]

    def lse_of(self, m: Tensor, norm: Tensor) -> Tensor:
        return m + torch.log(norm)

    # -------------------------------------------------------------------------------- backward

    def backward(
        self, saved: Any, do: Tensor, dl: Tensor | None, causal: bool, scale: float
    ) -> Any:
        """dQ, dK, dV in the inputs' shapes and dtypes."""
        q, k, v, out, lse = saved
        wide, shift = self.wide(q.dtype), k.shape[2] - q.shape[2]
        delta = self.folded(self.delta(out, do), dl)
        heads = self.kv_heads_of(q.shape[1], k.shape[1])
        kv = (k[:, heads], v[:, heads])
        dq = torch.zeros(q.shape, dtype=wide, device=q.device)
        dk, dv = (torch.zeros(kv[0].shape, dtype=wide, device=q.device) for _ in "kv")
        for keys in self.k_tiles(k.shape[2]):
            at_k = (slice(None), slice(None), slice(keys.start, keys.stop))
            for rows in self.q_tiles(q.shape[2]):
                if causal and self.is_skipped_backward(rows, keys, shift):
                    continue
                at_q = (slice(None), slice(None), slice(rows.start, rows.stop))
                p = self.probabilities(q, kv[0], lse, rows, keys, causal, scale)
                dp = self.dot(do[at_q], kv[1][at_k].transpose(-1, -2))
                ds = self.narrow(p * (dp - delta[at_q][..., None]), q.dtype)
                p = self.narrow(p, q.dtype)
                by_keys = self.dot(ds.transpose(-1, -2), q[at_q]) * self.scale_of_dk(scale)
                dv[at_k] = self.added_dkv(
                    dv[at_k], self.dot(p.transpose(-1, -2), do[at_q]), q.dtype
                )
                dk[at_k] = self.added_dkv(dk[at_k], by_keys, q.dtype)
                by_rows = self.dot(ds, kv[0][at_k]) * self.scale_of_dq(scale)
                dq[at_q] += by_rows
        dk, dv = (self.summed(t, k, heads) for t in (dk, dv))
        return self.as_given(q, dq), self.as_given(k, dk), self.as_given(v, dv)

    def delta(self, out: Tensor, do: Tensor) -> Tensor:
        """[B, H, Q], the sum of o do over D: what the softmax's Jacobian subtracts."""
        wide = self.wide(out.dtype)
        return (out.to(wide) * do.to(wide)).sum(dim=-1)

    def folded(self, delta: Tensor, dl: Tensor | None) -> Tensor:
        """L's own gradient enters each row like a part of delta: dL/ds = p."""
        return delta if dl is None else delta - dl

    def is_skipped_backward(self, rows: range, keys: range, shift: int) -> bool:
        return self.is_skipped(rows, keys, shift)

    def probabilities(
        self,
        q: Tensor,
        k: Tensor,
        lse: Tensor,
        rows: range,
        keys: range,
        causal: bool,
        scale: float,
    ) -> Tensor:
        """P of one tile, from the scores and L; zero in rows that see nothing."""
        q_tile, k_tile = q[:, :, rows.start : rows.stop], k[:, :, keys.start : keys.stop]
        s = self.scores(q_tile, k_tile, scale)
        s = self.masked(s, rows, keys, k.shape[2] - q.shape[2]) if causal else s
        of_rows = lse[:, :, rows.start : rows.stop, None]
        # With -inf the exponential would overflow in rows that see nothing; +inf makes them zero.
        return torch.exp(s - of_rows.masked_fill(of_rows == -torch.inf, torch.inf))

    def scale_of_dq(self, scale: float) -> float:
        return scale

    def scale_of_dk(self, scale: float) -> float:
        return scale

    def added_dkv(self, acc: Tensor, product: Tensor, dtype: torch.dtype) -> Tensor:
        return acc + product

    def summed(self, gradient: Tensor, of: Tensor, heads: Tensor) -> Tensor:
        """The sum over the query heads that read a key head, in wide."""
        whole = torch.zeros(of.shape, dtype=gradient.dtype, device=of.device)
        return whole.index_add_(1, heads.to(of.device), gradient)

    def as_given(self, of: Tensor, gradient: Tensor) -> Tensor:
        return gradient.to(of.dtype)

    @classmethod
    def functions(cls) -> dict[str, Any]:
        """Return the contract's function for this class."""
        how = cls()

        def flash_attention(q, k, v, *, causal=False, scale=None, return_lse=False):
            return how(q, k, v, causal=causal, scale=scale, return_lse=return_lse)

        return {"flash_attention": flash_attention}


class _TiledTwice(torch.autograd.Function):
    """The autograd node of whatever variant is its first argument; its backward differentiable."""

    @staticmethod
    def forward(ctx: Any, how: PlainAttention, q: Any, k: Any, v: Any, *options: Any) -> Any:
        out, lse = how.forward(q, k, v, *options)
        if how.saves_by_attribute:
            ctx.kept = q.detach(), k.detach(), v.detach(), out.detach(), lse.detach()
        else:
            # An output that is saved stays part of the graph, so a second derivative is right; a
            # copy is a constant to it.
            kept = lse.clone() if how.saves_copy_of_lse else lse
            ctx.save_for_backward(q, k, v, out, kept)
        ctx.how, ctx.options = how, options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, do: Any, dl: Any) -> Any:
        saved = ctx.kept if ctx.how.saves_by_attribute else ctx.saved_tensors
        do = torch.zeros_like(saved[3]) if do is None else do
        found = ctx.how.backward(saved, do, dl, *ctx.options)
        return None, *ctx.how.returned(found, ctx.needs_input_grad[1:4]), None, None


class _Tiled(_TiledTwice):
    """The same with first derivatives only."""

    backward = staticmethod(once_differentiable(_TiledTwice.backward))  # type: ignore[arg-type,assignment]  # as torch's own
