"""Near-misses of attention as an operator of PyTorch's: fakes, formulas, tangents, casts, state.

The base is the plain attention behind a pair of custom operators. It is itself a benign variant.

Legend: B batch, H query heads, G key/value heads, Q queries, K keys, D head dim.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from spec_tests.impostors.attention_values import card
from spec_tests.impostors.plain_attention import PlainAttention, Tensor

Pair = tuple[torch.Tensor, torch.Tensor]
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Operator(PlainAttention):
    """The plain attention as two operators, with all that PyTorch asks of such."""

    has_formula = True

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        super().check(q, k, v)
        if not torch.compiler.is_compiling():
            self.refuse_tangents(q, k, v)

    def refuse_tangents(self, *tensors: Tensor) -> None:
        if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
            raise NotImplementedError("expected q, k and v without tangents")

    def apply(self, *args: Any) -> tuple[Tensor, Tensor]:
        return registered(type(self))(*args)  # type: ignore[arg-type]  # a class has a hash

    def fake(self, q: Tensor) -> Tensor:
        """What the output looks like."""
        return q.new_empty(q.shape)


@functools.cache
def registered(variant: type[Operator]) -> Callable[..., Pair]:
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

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
        *tensors, ctx.causal, ctx.scale = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)

    def derive(ctx: Any, do: Any, dl: Any) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        do = torch.zeros_like(saved[3]) if do is None else do
        found = backward(do, dl, *saved, ctx.causal, ctx.scale)
        return *how.returned(found, ctx.needs_input_grad[:3]), None, None

    def fake(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Pair:
        return how.fake(q), q.new_empty(q.shape[:3], dtype=how.wide(q.dtype))

    forward.register_fake(fake)
    forward.register_autograd(derive, setup_context=keep)
    backward.register_fake(_fake_gradients)
    if how.has_formula:
        of, packet = torch.ops.trainspec_impostors, name.partition("::")[2]
        register_flop_formula(getattr(of, packet))(_count)
        register_flop_formula(getattr(of, f"{packet}_backward"))(_count_backward)
    return forward


def _fake_gradients(do: Any, dl: Any, q: Any, k: Any, v: Any, *rest: Any) -> Three:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _count(q: Any, k: Any, *rest: Any, **kwargs: Any) -> int:
    return int(4 * math.prod(q) * k[2])


def _count_backward(do: Any, dl: Any, q: Any, k: Any, *rest: Any, **kwargs: Any) -> int:
    return int(10 * math.prod(q) * k[2])


class LooksAtValues(Operator):
    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        super().check(q, k, v)
        if not bool(q.isfinite().all()):
            raise ValueError("expected q without NaN")


class FakeLikeQ(Operator):
    def fake(self, q: Tensor) -> Tensor:
        return torch.empty_like(q)


class Uncounted(Operator):
    has_formula = False


class DropsTangents(Operator):
    def refuse_tangents(self, *tensors: Tensor) -> None:
        pass


class AutocastReachesInside(PlainAttention):
    def cast(self, q: Tensor) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()


class KeepsTheLastLse(PlainAttention):
    """The log-sum-exp is a buffer of the module, and not of the call."""

    buffer: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Any:
        out, self.buffer = super().forward(q, k, v, *options)
        return out, self.buffer

    def backward(self, saved: Any, *rest: Any) -> Any:
        return super().backward((*saved[:4], self.buffer), *rest)


class Float64ByFloat32(PlainAttention):
    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        return super().dot(a.float(), b.float()).to(self.wide(a.dtype))


IMPOSTORS = (
    card(
        LooksAtValues,
        "looks-at-values",
        "Looks for NaN in q before it computes.",
        "A check of inputs that reads a value on the host.",
        "It is right, and slow on a device only.",
        "attention.operator.compiles",
    ),
    card(
        FakeLikeQ,
        "fake-like-q",
        "Its fake output has the strides of q, the real one is contiguous.",
        "`empty_like(q)`; flash-attn issue 2777.",
        "q is contiguous in tests of operators.",
        "attention.operator.says-what-it-does",
    ),
    card(
        Uncounted,
        "uncounted",
        "Is an operator without a formula of its operations.",
        "`torch.library.custom_op`, and nothing more.",
        "A zero in a table of utilisation is a low number among others.",
        "attention.operator.is-counted",
    ),
    card(
        DropsTangents,
        "drops-tangents",
        "Has a tangent of zero in forward mode.",
        "torch 2.13 drops it silently where no input of a custom operator requires a gradient; "
        "the reference of this repository did so.",
        "Nobody uses forward mode, until a Hessian-vector product does.",
        "attention.autograd.transforms",
    ),
    card(
        AutocastReachesInside,
        "autocast-reaches-inside",
        "Lets autocast make its inner products half precision.",
        "Products of float32 in a forward that is called under autocast.",
        "Without autocast it is right.",
        "attention.operator.under-autocast",
    ),
    card(
        KeepsTheLastLse,
        "keeps-the-last-lse",
        "Keeps the log-sum-exp of the last call for every backward.",
        "A buffer that is allocated once, for speed.",
        "A test makes one call.",
        "attention.autograd.calls-are-independent",
    ),
    card(
        Float64ByFloat32,
        "float64-by-float32",
        "Multiplies float64 in float32.",
        "`.float()` before every product, for the sake of half precision.",
        "Tests are in float32.",
        "attention.forward.float64",
    ),
)
