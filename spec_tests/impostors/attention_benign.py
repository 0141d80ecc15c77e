"""Right but unusual attention: every clause up to level `correct` must accept these."""

from __future__ import annotations

from typing import Any

import torch

from spec_tests.impostors.attention_operator import Operator
from spec_tests.impostors.card import Impostor
from spec_tests.impostors.plain_attention import PlainAttention, Tensor, offer


class UnevenTiles(PlainAttention):
    tile_q = 48
    tile_k = 19


class LastTileFirst(PlainAttention):
    """Walks along the keys from the end, as a kernel does that begins on the diagonal."""

    def k_tiles(self, num: int) -> list[range]:
        return super().k_tiles(num)[::-1]


class TwoPasses(PlainAttention):
    """Finds the maximum of a row first and sums with it afterwards: nothing is rescaled."""

    def row_block(
        self, q: Tensor, k: Tensor, v: Tensor, rows: range, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        at = slice(rows.start, rows.stop)
        s = self.scores(q[:, :, at], k, scale)
        if causal:
            s = self.masked(s, rows, range(k.shape[2]), k.shape[2] - q.shape[2])
        least = s.new_full((*s.shape[:-1], 1), -torch.inf)
        m = torch.cat([s, least], dim=-1).amax(dim=-1)
        p = torch.exp(s - self.safe(m)[..., None])
        return self.dot(self.narrow(p, q.dtype), v), m, p.sum(dim=-1)


class Base2(PlainAttention):
    """Exponentials and statistics of base two inside, the natural logarithm outside."""

    log2e = 1.4426950408889634

    def row_block(
        self, q: Tensor, k: Tensor, v: Tensor, rows: range, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        at = slice(rows.start, rows.stop)
        s = self.scores(q[:, :, at], k, scale * self.log2e)
        if causal:
            s = self.masked(s, rows, range(k.shape[2]), k.shape[2] - q.shape[2])
        least = s.new_full((*s.shape[:-1], 1), -torch.inf)
        m = torch.cat([s, least], dim=-1).amax(dim=-1)
        p = torch.exp2(s - self.safe(m)[..., None])
        return self.dot(self.narrow(p, q.dtype), v), m / self.log2e, p.sum(dim=-1)


class Reciprocal(PlainAttention):
    def normalised(self, acc: Tensor, norm: Tensor) -> Tensor:
        return acc * norm.masked_fill(norm == 0.0, 1.0).reciprocal()[..., None]


class WideProducts(PlainAttention):
    """P and dS stay wide where tensor cores would want them narrow."""

    def narrow(self, p: Tensor, dtype: torch.dtype) -> Tensor:
        return p.to(self.wide(dtype))


class LseIsNoOutput(PlainAttention):
    """The log-sum-exp is marked non-differentiable."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        found = super().__call__(q, k, v, **options)
        return (found[0], found[1].detach()) if options.get("return_lse") else found


class SecondDerivativeIsRight(PlainAttention):
    has_second_derivative = True


def _card(variant: type[PlainAttention], words: str, does: str) -> Impostor:
    return Impostor(f"benign.attention-{words}", does, "", "", (), functions=lambda: offer(variant))


IMPOSTORS = (
    _card(Operator, "operator", "A pair of custom operators."),
    _card(PlainAttention, "plain", "The base of attention's impostors: the null one."),
    _card(UnevenTiles, "uneven-tiles", "Tiles of 48 rows and 19 keys."),
    _card(LastTileFirst, "last-tile-first", "Visits tiles of keys from the end."),
    _card(TwoPasses, "two-passes", "Takes the maximum of a row before it sums."),
    _card(Base2, "base-2", "Computes in base two, answers in base e."),
    _card(Reciprocal, "reciprocal", "Multiplies by the reciprocal of the normaliser."),
    _card(WideProducts, "wide-products", "Rounds neither P nor dS."),
    _card(LseIsNoOutput, "lse-is-no-output", "Marks the log-sum-exp non-differentiable."),
    _card(SecondDerivativeIsRight, "second-derivative", "Has second derivatives, and right ones."),
)
