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

from spec_tests.museum.card import Source
from spec_tests.plain import attention

PLAIN = Source("spec_tests.plain.attention")


@functools.cache
def operators(name, fake_output=None, is_counted=True, refuses_tangents=True):
    """Return the plain attention as a pair of operators, with all that PyTorch asks of such.

    Args:
        name: of the forward's operator; the backward's is called after it.
        fake_output: makes of q what the output looks like; without one a new tensor.
        is_counted: whether PyTorch's counter has a formula of its operations.
        refuses_tangents: whether forward mode is an error.
    """

    @torch.library.custom_op(f"trainspec_impostors::{name}", mutates_args=())
    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(q.device.type, enabled=False):
            return attention.forward(q, k, v, causal, scale)

    @torch.library.custom_op(f"trainspec_impostors::{name}_backward", mutates_args=())
    def backward(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        do: torch.Tensor | None,
        dl: torch.Tensor | None,
        causal: bool,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return attention.backward((q, k, v, out, lse), do, dl, causal, scale)

    def keep(ctx, inputs, output):
        *tensors, causal, scale = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.options = causal, scale
        ctx.set_materialize_grads(False)

    def derive(ctx, do, dl):
        found = backward(*ctx.saved_tensors, do, dl, *ctx.options)
        wanted = ctx.needs_input_grad[:3]
        return *(g if needed else None for g, needed in zip(found, wanted, strict=True)), None, None

    def fake(q, k, v, causal, scale):
        out = fake_output(q) if fake_output else q.new_empty(q.shape)
        return out, q.new_empty(q.shape[:3], dtype=attention.wide(q.dtype))

    def attend(q, k, v, causal, scale):
        is_refused = refuses_tangents and not torch.compiler.is_compiling()
        if is_refused and any(forward_ad.unpack_dual(t).tangent is not None for t in (q, k, v)):
            raise NotImplementedError("expected q, k and v without tangents")
        return forward(q, k, v, causal, scale)

    forward.register_fake(fake)
    forward.register_autograd(derive, setup_context=keep)
    backward.register_fake(_fake_gradients)
    if is_counted:
        of = torch.ops.trainspec_impostors
        register_flop_formula(getattr(of, name))(_count)
        register_flop_formula(getattr(of, f"{name}_backward"))(_count_backward)
    return attend


def _fake_gradients(q, k, v, *rest):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _count(q, k, *rest, **kwargs):
    return int(4 * math.prod(q) * k[2])


def _count_backward(q, k, *rest, **kwargs):
    return int(10 * math.prod(q) * k[2])


def by_operators(made: str) -> tuple[str, ...]:
    """Return the difference by which the plain attention computes with the operators made so."""
    return (
        "  Tensor = torch.Tensor",
        "+ from spec_tests.museum.catalogue.attention_operator import operators",
        f"+ attend = {made}",
        "...",
        "- out, lse = TiledAttention.apply(q, k, v, causal, scale)",
        "+ out, lse = attend(q, k, v, causal, scale)",
    )


PLAIN.near_miss(
    "attention.looks-at-values",
    "attention.operator.compiles",
    *by_operators('operators("right")'),
    "...",
    "  check(q, k, v)",
    "+ if not bool(q.isfinite().all()):",
    '+     raise ValueError("expected q without NaN")',
    does="Looks for NaN in q before it computes.",
    seen="A check of inputs that reads a value on the host.",
    unseen="It is right, and slow on a device only.",
)

PLAIN.near_miss(
    "attention.fake-like-q",
    "attention.operator.says-what-it-does",
    *by_operators('operators("fake_like_q", fake_output=torch.empty_like)'),
    does="Its fake output has the strides of q, the real one is contiguous.",
    seen="`empty_like(q)`; flash-attn issue 2777.",
    unseen="q is contiguous in tests of operators.",
)

PLAIN.near_miss(
    "attention.uncounted",
    "attention.operator.is-counted",
    *by_operators('operators("uncounted", is_counted=False)'),
    does="Is an operator without a formula of its operations.",
    seen="`torch.library.custom_op`, and nothing more.",
    unseen="A zero in a table of utilisation is a low number among others.",
)

PLAIN.near_miss(
    "attention.drops-tangents",
    "attention.autograd.transforms",
    *by_operators('operators("drops_tangents", refuses_tangents=False)'),
    does="Has a tangent of zero in forward mode.",
    seen="torch 2.13 drops it silently where no input of a custom operator requires a gradient; "
    "the reference of this repository did so.",
    unseen="Nobody uses forward mode, until a Hessian-vector product does.",
)

PLAIN.near_miss(
    "attention.autocast-reaches-inside",
    "attention.operator.under-autocast",
    "- with torch.autocast(q.device.type, enabled=False):",
    "-     out, lse = TiledAttention.apply(q, k, v, causal, scale)",
    "+ out, lse = TiledAttention.apply(q, k, v, causal, scale)",
    does="Lets autocast make its inner products half precision.",
    seen="Products of float32 in a forward that is called under autocast.",
    unseen="Without autocast it is right.",
)

PLAIN.near_miss(
    "attention.keeps-the-last-lse",
    "attention.autograd.calls-are-independent",
    "  lse = q.new_full(q.shape[:-1], -torch.inf, dtype=wide(q.dtype))",
    "+ forward.buffer = lse",
    "...",
    "- lse = lse.masked_fill(lse == -torch.inf, torch.inf)",
    "+ lse = forward.buffer.masked_fill(forward.buffer == -torch.inf, torch.inf)",
    does="Keeps the log-sum-exp of the last call for every backward.",
    seen="A buffer that is allocated once, for speed.",
    unseen="A test makes one call.",
)

PLAIN.near_miss(
    "attention.float64-by-float32",
    "attention.forward.float64",
    "- return a.to(b.dtype).to(wide(b.dtype)) @ b.to(wide(b.dtype))",
    "+ return (a.to(b.dtype).float() @ b.float()).to(wide(b.dtype))",
    does="Multiplies float64 in float32.",
    seen="`.float()` before every product, for the sake of half precision.",
    unseen="Tests are in float32.",
)

PLAIN.benign(
    "benign.attention-uneven-tiles",
    "- TILE_Q = 32",
    "+ TILE_Q = 48",
    "- TILE_K = 32",
    "+ TILE_K = 19",
    does="Tiles of 48 rows and 19 keys.",
)

PLAIN.benign(
    "benign.attention-last-tile-first",
    "- return [keys for keys in tiles(k.shape[2], TILE_K) if keys.start < end]",
    "+ return [keys for keys in tiles(k.shape[2], TILE_K)[::-1] if keys.start < end]",
    does="Visits tiles of keys from the end.",
)

# The maximum does not grow in the second pass: nothing is rescaled.
PLAIN.benign(
    "benign.attention-two-passes",
    "  m, norm = torch.full_like(acc[..., 0], -torch.inf), torch.zeros_like(acc[..., 0])",
    "+ for keys in tiles_seen(rows, q, k, causal):",
    "+     m = torch.maximum(m, scores(q, k, rows, keys, causal, scale).amax(dim=-1))",
    does="Takes the maximum of a row before it sums.",
)

# Exponentials and statistics of base two inside, the natural logarithm outside.
PLAIN.benign(
    "benign.attention-base-2",
    "  s = scores(q, k, rows, keys, causal, scale)",
    "+ s = s * 1.4426950408889634",
    "...",
    "- p = torch.exp(s - safe[..., None])",
    "- rescale = torch.exp(m - safe)",
    "+ p = torch.exp2(s - safe[..., None])",
    "+ rescale = torch.exp2(m - safe)",
    "...",
    "- lse[:, :, rows] = m + torch.log(norm)",
    "+ lse[:, :, rows] = (m + torch.log2(norm)) / 1.4426950408889634",
    does="Computes in base two, answers in base e.",
)

PLAIN.benign(
    "benign.attention-reciprocal",
    "- out[:, :, rows] = acc / norm.masked_fill(norm == 0.0, 1.0)[..., None]",
    "+ out[:, :, rows] = acc * norm.masked_fill(norm == 0.0, 1.0).reciprocal()[..., None]",
    does="Multiplies by the reciprocal of the normaliser.",
)

PLAIN.benign(
    "benign.attention-wide-products",
    "- return a.to(b.dtype).to(wide(b.dtype)) @ b.to(wide(b.dtype))",
    "+ return a.to(wide(b.dtype)) @ b.to(wide(b.dtype))",
    does="Rounds neither P nor dS.",
)

PLAIN.benign(
    "benign.attention-lse-is-no-output",
    "- return (out, lse) if return_lse else out",
    "+ return (out, lse.detach()) if return_lse else out",
    does="Marks the log-sum-exp non-differentiable.",
)

PLAIN.benign(
    "benign.attention-second-derivative",
    "- @once_differentiable",
    does="Has second derivatives, and right ones.",
)

PLAIN.benign(
    "benign.attention-operator",
    *by_operators('operators("right")'),
    does="A pair of custom operators.",
)

PLAIN.benign("benign.attention-plain", does="The base of attention's impostors: the null one.")
