"""Real bugs of attention: alignment of the mask, rows without a key, gradients that go nowhere."""

from __future__ import annotations

import torch

from spec_tests.museum.reality import faulty
from spec_tests.plain.attention import PlainAttention


@faulty("flash-attention-282")
class AlignsTopLeft(PlainAttention):
    """Query i sees key j where j <= i, however many keys precede the first query.

    https://github.com/Dao-AILab/flash-attention/issues/282
    """

    def visible(self, rows, keys, shift):
        return super().visible(rows, keys, 0)

    def is_skipped(self, rows, keys, shift):
        return super().is_skipped(rows, keys, 0)


@faulty("aprender-2203")
class SeversTheGraph(PlainAttention):
    """Computes with copies of the values, which know nothing of where they came from.

    https://github.com/paiml/aprender/pull/2203
    """

    def apply(self, q, k, v, *options):
        return super().apply(q.detach(), k.detach(), v.detach(), *options)


@faulty("burn-4697")
class BlindRowsAreNaN(PlainAttention):
    """The maximum of no score is minus infinity, and is subtracted all the same.

    https://github.com/tracel-ai/burn/pull/4697
    """

    def safe(self, m):
        return m


@faulty("deepmd-kit-5715")
class MasksAfterwards(PlainAttention):
    """Exponentiates all scores over the maximum of the visible ones, and masks the result.

    https://github.com/deepmodeling/deepmd-kit/pull/5715
    """

    def row_block(self, q, k, v, rows, causal, scale):
        q_tile, shift = q[:, :, rows.start : rows.stop], k.shape[2] - q.shape[2]
        acc = torch.zeros(q_tile.shape, dtype=self.wide(q.dtype), device=q.device)
        m, norm = self.start(acc[..., 0])
        for keys in self.k_tiles(k.shape[2]):
            if causal and self.is_skipped(rows, keys, shift):
                continue
            s = self.scores(q_tile, k[:, :, keys.start : keys.stop], scale)
            seen = (
                self.visible(rows, keys, shift)
                if causal
                else torch.ones_like(s[0, 0], dtype=torch.bool)
            )
            new = self.maximum(m, s.masked_fill(~seen, -torch.inf))
            safe = self.safe(new)
            p = torch.exp(s - safe[..., None]) * seen
            rescale = torch.exp(m - safe)
            norm = self.rescaled_norm(norm, rescale) + p.sum(dim=-1)
            v_tile = v[:, :, keys.start : keys.stop]
            product = self.dot(self.narrow(p, q.dtype), v_tile)
            acc = self.added(self.rescaled_acc(acc, rescale), product, q.dtype)
            m = new
        return acc, m, norm


@faulty("flashinfer-4401")
class FiniteSentinel(PlainAttention):
    """The maximum starts at a large negative number, which scores may lie below.

    https://github.com/flashinfer-ai/flashinfer/pull/4401
    """

    sentinel = -5e4

    def start(self, like):
        m, norm = super().start(like)
        return torch.full_like(m, self.sentinel), norm
