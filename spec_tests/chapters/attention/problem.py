"""A problem of attention, its inputs, and its two answers: the definition, and a plain attempt.

Legend: B batch, H query heads, G key/value heads, Q queries, K keys, D head dim.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

Answer = dict[str, torch.Tensor]
"""By name: O, L (the log-sum-exp of each row), dQ, dK, dV."""
GRADIENTS = ("dQ", "dK", "dV")
OUTPUT_AND_GRADIENTS = ("O", *GRADIENTS)
ALL = ("O", "L", *GRADIENTS)

WHOLE_TILES = 128
"""A length that any tile up to it divides: the exercise's own."""

FITS = ("", "head dims", "equal lengths", "whole tiles", "whole tiles, equal lengths")
"""Sizes that a subject may insist on, the strictest last; "" is any size."""


@dataclass(frozen=True)
class Problem:
    """Shapes, mask, scale, dtype and data of one call; `repr` is what a failure prints.

    Attributes:
        batch, heads, kv_heads, seq_q, seq_k, head_dim: sizes; None means "as q has".
        causal, scale: as in the contract; None leaves them out of the call.
        dtype: name of the inputs' dtype.
        data: a key of `DATA`, the distribution of the inputs.
        upstream: factor of dO.
        lse_gradient: whether the log-sum-exp has a gradient of its own.
        fit: of `FITS`, what the sizes were changed to.
    """

    seq_q: int = 70
    seq_k: int | None = None
    head_dim: int = 16
    batch: int = 1
    heads: int = 2
    kv_heads: int | None = None
    causal: bool | None = False
    scale: float | None = None
    dtype: str = "float32"
    data: str = "normal"
    upstream: float = 1.0
    lse_gradient: bool = False
    seed: int = 0
    fit: str = ""

    def __repr__(self) -> str:
        shown = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if field.name in ("seq_q", "dtype")
            or (getattr(self, field.name) != field.default and field.name != "fit")
        ]
        why = f" ({self.fit}: other sizes fail or are refused, see attention.shapes)"
        return f"Problem({', '.join(shown)}){why if self.fit else ''}"

    def but(self, **changes: object) -> Problem:
        """The same with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]  # names of fields

    def fitted(self, fit: str) -> Problem:
        """The same in sizes that a subject insists on.

        Whole tiles are powers of two, lengths from `WHOLE_TILES` and head dims from 16 on. Unequal
        lengths stay unequal, and the longer stays the longer. Head dims are powers of two there
        and in "head dims".
        """
        lengths, head_dim = [self.seq_q, self.num_keys], self.head_dim
        if "whole tiles" in fit:
            longer = lengths[1] > lengths[0]
            lengths = [max(WHOLE_TILES, _power_of_two(length)) for length in lengths]
            if self.seq_q != self.num_keys and lengths[0] == lengths[1]:
                lengths[longer] *= 2
        if "whole tiles" in fit or "head dims" in fit:
            head_dim = max(16, _power_of_two(head_dim))
        if "equal lengths" in fit:
            lengths[1] = lengths[0]
        return self.but(seq_q=lengths[0], seq_k=lengths[1], head_dim=head_dim, fit=fit)

    @property
    def num_keys(self) -> int:
        """K: keys and values."""
        return self.seq_q if self.seq_k is None else self.seq_k

    @property
    def num_kv_heads(self) -> int:
        """G: heads of keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def torch_dtype(self) -> torch.dtype:
        """That of q, k, v and the output."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def factor(self) -> float:
        """What the scores are multiplied by."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def visible(self) -> torch.Tensor:
        """[Q, K], True where a query sees a key: the last query sees all of them."""
        seen = torch.ones(self.seq_q, self.num_keys, dtype=torch.bool)
        return seen.tril(self.num_keys - self.seq_q) if self.causal else seen


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


@dataclass
class Inputs:
    """q [B, H, Q, D]; k, v [B, G, K, D]; do [B, H, Q, D]; dl [B, H, Q] in float32 or wider."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor
    dl: torch.Tensor

    def but(self, **changes: torch.Tensor) -> Inputs:
        """The same with some tensors replaced."""
        return dataclasses.replace(self, **changes)

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
        """The same with every tensor changed; what is one tensor stays one."""
        made = {id(tensor): change(tensor) for tensor in vars(self).values()}
        return Inputs(*(made[id(tensor)] for tensor in vars(self).values()))

    def to(self, device: torch.device) -> Inputs:
        """On a device, q, k and v ready to receive gradients."""
        moved = self.each(lambda tensor: tensor.to(device))
        for leaf in (moved.q, moved.k, moved.v):
            leaf.requires_grad_()
        return moved


Change = Callable[[Inputs], Inputs]
"""A way to ask otherwise. It travels to the ranks by name: a function, or a partial of one."""


def same(x: Inputs) -> Inputs:
    """The inputs as they are."""
    return x


def _channel(t: torch.Tensor, number: int) -> torch.Tensor:
    # Real activations have a few channels that are an order of magnitude above the others.
    factors = torch.ones(t.shape[-1], dtype=t.dtype)
    factors[number] = 30.0
    return t * factors


DATA: dict[str, Change] = {
    "normal": same,
    "outliers": lambda x: x.but(k=_channel(x.k, 3), v=_channel(x.v, 5)),
    "ones": lambda x: x.each(torch.ones_like),
    "large": lambda x: x.but(q=x.q * 40),
    "negative": lambda x: x.but(q=6 * x.q.abs(), k=-6 * x.k.abs()),
    "equal-keys": lambda x: x.but(k=x.k[:, :, :1].expand_as(x.k).contiguous()),
}
"""Distributions of inputs. Gaussian data alone never moved a faulty rescale that outliers do."""


def inputs(problem: Problem) -> Inputs:
    """The same tensors in every process, contiguous, on CPU."""
    p = problem
    generator = torch.Generator().manual_seed(p.seed)
    wide = torch.float64 if p.dtype == "float64" else torch.float32

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=wide)

    drawn = Inputs(
        q=normal(p.batch, p.heads, p.seq_q, p.head_dim),
        k=normal(p.batch, p.num_kv_heads, p.num_keys, p.head_dim),
        v=normal(p.batch, p.num_kv_heads, p.num_keys, p.head_dim),
        do=normal(p.batch, p.heads, p.seq_q, p.head_dim),
        dl=normal(p.batch, p.heads, p.seq_q),
    )
    made = DATA[p.data](drawn)
    q, k, v, do = (t.to(p.torch_dtype) for t in (made.q, made.k, made.v, made.do * p.upstream))
    return Inputs(q, k, v, do, made.dl)


def dense(problem: Problem, x: Inputs, dtype: torch.dtype, *, scale_on_keys: bool) -> Answer:
    """Attention by its definition in `dtype`, every score in memory, gradients by autograd.

    Rows that see nothing give zeros, -inf and no gradient. With `scale_on_keys` the same in
    another order of rounding.
    """
    device = x.q.device
    q, k, v = (t.detach().to(dtype).requires_grad_() for t in (x.q, x.k, x.v))
    seen = problem.visible().to(device)
    blind = ~seen.any(dim=-1)  # [Q]
    group = problem.heads // max(1, problem.num_kv_heads)
    factor = problem.factor
    keys, values = (t.repeat_interleave(group, dim=1) for t in (k, v))
    keys = keys * factor if scale_on_keys else keys
    scores = q @ keys.transpose(-1, -2)
    scores = scores if scale_on_keys else scores * factor
    # Softmax of nothing but -inf is NaN, and so is its gradient: such rows see zeros, then vanish.
    hidden = ~seen & ~blind[:, None]
    scores = scores.masked_fill(hidden, -torch.inf).masked_fill(blind[:, None], 0.0)
    out = scores.softmax(dim=-1).masked_fill(blind[:, None], 0.0) @ values
    lse = scores.logsumexp(dim=-1).masked_fill(blind, -torch.inf)
    upstream, outputs = [x.do.to(dtype)], [out]
    if problem.lse_gradient:
        outputs.append(lse)
        upstream.append(x.dl.to(dtype))
    gradients = torch.autograd.grad(outputs, (q, k, v), upstream)
    answer = {"O": out, "L": lse, **dict(zip(("dQ", "dK", "dV"), gradients, strict=True))}
    return {name: tensor.detach() for name, tensor in answer.items()}


def narrow(problem: Problem, tile: int) -> torch.Tensor:
    """Return O by tiles of keys, with scores, maxima and sums in the inputs' dtype."""
    x, seen = inputs(problem), problem.visible()
    group = problem.heads // max(1, problem.num_kv_heads)
    keys, values = (t.repeat_interleave(group, dim=1) for t in (x.k, x.v))
    out, maximum = torch.zeros_like(x.q), torch.full_like(x.q[..., :1], -torch.inf)
    norm = torch.zeros_like(maximum)
    for start in range(0, problem.num_keys, tile):
        part = slice(start, start + tile)
        scores = x.q @ keys[:, :, part].transpose(-1, -2) * problem.factor
        scores = scores.masked_fill(~seen[:, part], -torch.inf)
        larger = torch.maximum(maximum, scores.amax(dim=-1, keepdim=True))
        weights, rescale = (torch.exp(each - larger) for each in (scores, maximum))
        norm = norm * rescale + weights.sum(dim=-1, keepdim=True)
        out, maximum = out * rescale + weights @ values[:, :, part], larger
    return out / norm


@functools.lru_cache(maxsize=64)
def reference(problem: Problem) -> Answer:
    """The definition in float64, on the inputs as they were rounded."""
    return dense(problem, inputs(problem), torch.float64, scale_on_keys=False)


@functools.lru_cache(maxsize=64)
def baseline(problem: Problem) -> Answer:
    """A plain attempt in the inputs' own dtype: how far honest rounding goes."""
    return dense(problem, inputs(problem), problem.torch_dtype, scale_on_keys=True)


AS_THE_EXERCISE = Problem(seq_q=WHOLE_TILES, head_dim=64, batch=2, heads=2)
"""What level `course` asks for: the size of the exercise's own test, which has a batch of four.

One size, for a kernel may be compiled anew for each; that others are right is level `correct`.
"""

RAGGED = Problem(seq_q=70, seq_k=90, head_dim=24, heads=1)
"""Lengths that no tile divides, several tiles of 16, 32 or 64. One head: tiles are what counts."""
