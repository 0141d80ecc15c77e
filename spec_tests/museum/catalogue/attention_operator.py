"""Near-misses of attention as an operator of PyTorch's: fakes, formulas, tangents, casts, state.

The base is the plain attention behind a pair of custom operators. It is itself a benign variant.

Legend: B batch, H query heads, G key/value heads, Q queries, K keys, D head dim.
"""

from __future__ import annotations

import functools
import math

import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from spec_tests.museum.card import Source, benign, near_miss
from spec_tests.plain.attention import PlainAttention

PLAIN = Source("spec_tests.plain.attention")


class Operator(PlainAttention):
    """The plain attention as two operators, with all that PyTorch asks of such."""

    has_formula = True

    def check(self, q, k, v):
        super().check(q, k, v)
        if not torch.compiler.is_compiling():
            self.refuse_tangents(q, k, v)

    def refuse_tangents(self, *tensors):
        if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
            raise NotImplementedError("expected q, k and v without tangents")

    def apply(self, *args):
        return registered(type(self))(*args)  # type: ignore[arg-type]  # a class has a hash

    def fake(self, q):
        """What the output looks like."""
        return q.new_empty(q.shape)


@functools.cache
def registered(variant):
    """The variant's forward operator; its backward is another one."""
    how, name = variant(), f"trainspec_impostors::{variant.__name__.lower()}"

    @torch.library.custom_op(name, mutates_args=())
    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with how.cast(q):
            out, lse = how.forward(q, k, v, causal, scale)
        return out, lse

    @torch.library.custom_op(f"{name}_backward", mutates_args=())
    def backward(
        do: torch.Tensor,
        dl: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dq, dk, dv = how.backward((q, k, v, out, lse), do, dl, causal, scale)
        return dq, dk, dv

    def keep(ctx, inputs, output):
        *tensors, ctx.causal, ctx.scale = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)

    def derive(ctx, do, dl):
        saved = ctx.saved_tensors
        do = torch.zeros_like(saved[3]) if do is None else do
        found = backward(do, dl, *saved, ctx.causal, ctx.scale)
        return *how.returned(found, ctx.needs_input_grad[:3]), None, None

    def fake(q, k, v, causal, scale):
        return how.fake(q), q.new_empty(q.shape[:3], dtype=how.wide(q.dtype))

    forward.register_fake(fake)
    forward.register_autograd(derive, setup_context=keep)
    backward.register_fake(_fake_gradients)
    if how.has_formula:
        of, packet = torch.ops.trainspec_impostors, name.partition("::")[2]
        register_flop_formula(getattr(of, packet))(_count)
        register_flop_formula(getattr(of, f"{packet}_backward"))(_count_backward)
    return forward


def _fake_gradients(do, dl, q, k, v, *rest):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _count(q, k, *rest, **kwargs):
    return int(4 * math.prod(q) * k[2])


def _count_backward(do, dl, q, k, *rest, **kwargs):
    return int(10 * math.prod(q) * k[2])


@near_miss("attention.looks-at-values", rejected_by="attention.operator.compiles")
class LooksAtValues(Operator):
    """Looks for NaN in q before it computes.

    From: A check of inputs that reads a value on the host.
    Unseen: It is right, and slow on a device only.
    """

    def check(self, q, k, v):
        super().check(q, k, v)
        if not bool(q.isfinite().all()):
            raise ValueError("expected q without NaN")


@near_miss("attention.fake-like-q", rejected_by="attention.operator.says-what-it-does")
class FakeLikeQ(Operator):
    """Its fake output has the strides of q, the real one is contiguous.

    From: `empty_like(q)`; flash-attn issue 2777.
    Unseen: q is contiguous in tests of operators.
    """

    def fake(self, q):
        return torch.empty_like(q)


@near_miss("attention.uncounted", rejected_by="attention.operator.is-counted")
class Uncounted(Operator):
    """Is an operator without a formula of its operations.

    From: `torch.library.custom_op`, and nothing more.
    Unseen: A zero in a table of utilisation is a low number among others.
    """

    has_formula = False


@near_miss("attention.drops-tangents", rejected_by="attention.autograd.transforms")
class DropsTangents(Operator):
    """Has a tangent of zero in forward mode.

    From: torch 2.13 drops it silently where no input of a custom operator requires a gradient; the
    reference of this repository did so.
    Unseen: Nobody uses forward mode, until a Hessian-vector product does.
    """

    def refuse_tangents(self, *tensors):
        pass


PLAIN.near_miss(
    "attention.autocast-reaches-inside",
    "attention.operator.under-autocast",
    "- return torch.autocast(q.device.type, enabled=False)",
    "+ return contextlib.nullcontext()",
    does="Lets autocast make its inner products half precision.",
    seen="Products of float32 in a forward that is called under autocast.",
    unseen="Without autocast it is right.",
)

PLAIN.near_miss(
    "attention.keeps-the-last-lse",
    "attention.autograd.calls-are-independent",
    "  lse = torch.full(q.shape[:-1], -torch.inf, dtype=self.wide(q.dtype), device=q.device)",
    "+ self.buffer = lse",
    "...",
    "- q, k, v, out, lse = saved",
    "+ q, k, v, out, lse = *saved[:4], self.buffer",
    does="Keeps the log-sum-exp of the last call for every backward.",
    seen="A buffer that is allocated once, for speed.",
    unseen="A test makes one call.",
)

PLAIN.near_miss(
    "attention.float64-by-float32",
    "attention.forward.float64",
    "- return a.to(wide) @ b.to(wide)",
    "+ return (a.float() @ b.float()).to(wide)",
    does="Multiplies float64 in float32.",
    seen="`.float()` before every product, for the sake of half precision.",
    unseen="Tests are in float32.",
)

PLAIN.benign(
    "benign.attention-uneven-tiles",
    "- tile_q = 32",
    "+ tile_q = 48",
    "...",
    "- tile_k = 32",
    "+ tile_k = 19",
    does="Tiles of 48 rows and 19 keys.",
)

PLAIN.benign(
    "benign.attention-last-tile-first",
    "- return self.tiles(num, self.tile_k)",
    "+ return self.tiles(num, self.tile_k)[::-1]",
    does="Visits tiles of keys from the end.",
)


@benign("benign.attention-two-passes")
class TwoPasses(PlainAttention):
    """Takes the maximum of a row before it sums.

    Finds the maximum of a row first and sums with it afterwards: nothing is rescaled.
    """

    exp, unit = staticmethod(torch.exp), 1.0  # powers of a base, and its logarithm of e

    def row_block(self, q, k, v, rows, causal, scale):
        at = slice(rows.start, rows.stop)
        s = self.scores(q[:, :, at], k, scale * self.unit)
        if causal:
            s = self.masked(s, rows, range(k.shape[2]), k.shape[2] - q.shape[2])
        least = s.new_full((*s.shape[:-1], 1), -torch.inf)
        m = torch.cat([s, least], dim=-1).amax(dim=-1)
        p = self.exp(s - self.safe(m)[..., None])
        return self.dot(self.narrow(p, q.dtype), v), m / self.unit, p.sum(dim=-1)


@benign("benign.attention-base-2")
class Base2(TwoPasses):
    """Computes in base two, answers in base e.

    Exponentials and statistics of base two inside, the natural logarithm outside.
    """

    exp, unit = staticmethod(torch.exp2), 1.4426950408889634


PLAIN.benign(
    "benign.attention-reciprocal",
    "- return acc / norm.masked_fill(norm == 0.0, 1.0)[..., None]",
    "+ return acc * norm.masked_fill(norm == 0.0, 1.0).reciprocal()[..., None]",
    does="Multiplies by the reciprocal of the normaliser.",
)

PLAIN.benign(
    "benign.attention-wide-products",
    "- return p.to(dtype)",
    "+ return p.to(self.wide(dtype))",
    does="Rounds neither P nor dS.",
)

PLAIN.benign(
    "benign.attention-lse-is-no-output",
    '- return (out, lse) if options.get("return_lse") else out',
    '+ return (out, lse.detach()) if options.get("return_lse") else out',
    does="Marks the log-sum-exp non-differentiable.",
)

PLAIN.benign(
    "benign.attention-second-derivative",
    "- has_second_derivative = False",
    "+ has_second_derivative = True",
    does="Has second derivatives, and right ones.",
)


@benign("benign.attention-operator")
class AttentionOperator(Operator):
    """A pair of custom operators."""


PLAIN.benign("benign.attention-plain", does="The base of attention's impostors: the null one.")
