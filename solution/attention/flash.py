"""FlashAttention as PyTorch operators with a backward, for any algorithm that computes it.

`register` makes a pair of operators, `torch.ops.trainspec.flash_attention_NAME` and
`..._NAME_backward`, of two functions on plain tensors, with what the rest of PyTorch asks:

1. autograd: q, k, v, output and LSE are kept, O(N) bytes; what needs no gradient gets none.
2. fake: dtypes, shapes and strides, so that `torch.compile(fullgraph=True)` sees one node.
3. FLOPs, for `FlopCounterMode`: two products forward and five backward (as the papers count;
   seven where each of dQ and dK/dV makes the scores again), half where `causal` hides half.

`flash_attention` adds the checks and the forms of the contract; `function_class` makes the autograd
function of the exercise around the same operators. The output is contiguous.
First derivatives, backward only. A second one is refused when it is asked for, since the LSE that
the backward takes for a constant is none; so is a tangent of forward mode, which PyTorch drops
without a word where no input requires a gradient. A wrong number would come out of either.

Legend: B batch, H heads, G key/value heads, Q queries, K keys, D head dim.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from solution.attention.inputs import as_4d, check, checked_scale, under_autocast
from solution.attention.tiled import tiled_backward, tiled_forward

Tensors2 = tuple[torch.Tensor, torch.Tensor]
Tensors3 = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_FORWARD = "(Tensor q, Tensor k, Tensor v, bool causal, float scale) -> (Tensor, Tensor)"
_BACKWARD = (
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "bool causal, float scale, bool wants_q, bool wants_kv) -> (Tensor, Tensor, Tensor)"
)


@dataclass(frozen=True)
class Algorithm:
    """The two operators of one way to compute attention.

    `forward(q, k, v, causal, scale) -> (out, lse)` is differentiable; `backward(dout, dlse or None,
    q, k, v, out, lse, causal, scale, wants_q, wants_kv) -> (dq, dk, dv)` is what it calls, and what
    it does not want is an empty tensor.
    """

    forward: Callable[..., Tensors2]
    backward: Callable[..., Tensors3]


def register(
    name: str, forward: Callable[..., Tensors2], backward: Callable[..., Tensors3]
) -> Algorithm:
    """The operators of two functions with the arguments of `tiled_forward`, `tiled_backward`."""

    qualified = f"trainspec::flash_attention_{name}"

    @torch.library.custom_op(qualified, mutates_args=(), schema=_FORWARD)
    def forward_op(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> Tensors2:
        with torch.autocast(q.device.type, enabled=False):  # sums are float32, inside as outside
            return forward(q, k, v, causal=causal, scale=scale)

    @torch.library.custom_op(f"{qualified}_backward", mutates_args=(), schema=_BACKWARD)
    def backward_op(dout: torch.Tensor, *arguments: Any) -> Tensors3:
        *tensors, causal, scale, wants_q, wants_kv = arguments
        wants = {"wants_q": wants_q, "wants_kv": wants_kv}
        with torch.autocast(dout.device.type, enabled=False):
            return backward(dout, *tensors, causal=causal, scale=scale, **wants)

    def autograd(
        ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout  # only the LSE was used
        gradients = backward_op(dout, dlse, q, k, v, out, lse, ctx.causal, ctx.scale, *wanted(ctx))
        needed = zip(gradients, ctx.needs_input_grad[:3], strict=True)
        return *(gradient if needs else None for gradient, needs in needed), None, None

    forward_op.register_fake(_fake_forward)
    forward_op.register_autograd(autograd, setup_context=_keep)
    backward_op.register_fake(_fake_backward)
    backward_op.register_autograd(_refuse)
    operators = torch.ops.trainspec
    register_flop_formula(getattr(operators, f"flash_attention_{name}"))(_forward_flops)
    register_flop_formula(getattr(operators, f"flash_attention_{name}_backward"))(_backward_flops)
    return Algorithm(forward_op, backward_op)


def wanted(ctx: Any) -> tuple[bool, bool]:
    """Return whether q needs a gradient, and whether k or v does."""
    needs_q, needs_k, needs_v = ctx.needs_input_grad[:3]
    return needs_q, needs_k or needs_v


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensors2) -> None:
    q, k, v, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def _refuse(ctx: Any, *gradients: Any) -> None:
    raise NotImplementedError(
        "flash attention has first derivatives only, expected no gradient of its gradient; use "
        "attention(..., backend='plain') where second derivatives are needed"
    )


def _refuse_tangents(*tensors: torch.Tensor) -> None:
    if torch.compiler.is_compiling():
        return  # of forward mode the compiler says itself that it has none
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise NotImplementedError(
            "flash attention has no forward-mode derivative, expected q, k and v without tangents; "
            "use attention(..., backend='plain') where they are needed"
        )


def _fake_forward(q: torch.Tensor, *others: Any) -> Tensors2:
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=sums)


def _fake_backward(
    dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, *others: Any
) -> Tensors3:
    wants_q, wants_kv = others[-2:]
    dq = q.new_empty(q.shape if wants_q else (0,))
    dk = k.new_empty(k.shape if wants_kv else (0,))
    return dq, dk, torch.empty_like(dk)


# ------------------------------------------------------------------------------------------- FLOPs


def flops(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], *, causal: bool, num_products: int = 2
) -> int:
    """Operations of so many products of scores' size; 2 are a forward, 5 a backward.

    Causal counts the keys that queries see on average, `(max(0, K - Q) + K) / 2` for Q <= K: exact
    but for half the diagonal, and how the papers count.

    >>> flops((1, 1, 8, 4), (1, 1, 8, 4), causal=False)
    1024
    >>> flops((1, 1, 8, 4), (1, 1, 8, 4), causal=True)
    512
    """
    batch, heads, num_queries, head_dim = q_shape
    num_keys = k_shape[2]
    pairs_twice = 2 * num_queries * num_keys
    if causal:
        seeing = min(num_queries, num_keys)  # the queries before them see nothing
        pairs_twice = seeing * (2 * num_keys - seeing)
    return num_products * batch * heads * head_dim * pairs_twice


def _forward_flops(q: Any, k: Any, v: Any, causal: bool, *args: Any, **kwargs: Any) -> int:
    return flops(tuple(q), tuple(k), causal=causal)


def _backward_flops(dout: Any, dlse: Any, q: Any, k: Any, *args: Any, **kwargs: Any) -> int:
    causal = args[3]  # after v, out and lse
    return flops(tuple(q), tuple(k), causal=causal, num_products=5)


# ------------------------------------------------------------------------------- what users call

TILED = register("tiled", tiled_forward, tiled_backward)


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention in O(N) memory, in PyTorch operations, on any device.

    Args:
        q: `[batch, heads, seq_q, head_dim]` of float16, bfloat16, float32 or float64, any strides.
        k, v: `[batch, kv_heads, seq_k, head_dim]`, dtype and device of q; query head h reads key
            head `h // (heads // kv_heads)`. All three with 3 dims are without heads.
        causal: bottom-right: row i sees keys j <= i + seq_k - seq_q. PyTorch's `is_causal` is
            top-left, which is the same only for seq_q = seq_k.
        scale: of the scores; None is `head_dim ** -0.5`.
        return_lse: also the natural log-sum-exp of each row's scores, `[batch, heads, seq_q]`,
            float32 (float64 for float64), differentiable.

    Returns:
        The output in q's dtype and shape, contiguous; rows that see nothing give zeros, and -inf.

    Raises:
        ValueError: inputs that do not fit each other, named with both values.
        NotImplementedError: in the backward of a backward, and in forward mode.
    """
    return call(TILED, q, k, v, causal=causal, scale=scale, return_lse=return_lse)


def call(
    algorithm: Algorithm,
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool,
    scale: float | None,
    return_lse: bool,
) -> Any:
    """The algorithm on inputs of either form, once they are checked."""
    q, k, v = under_autocast(q, k, v)
    check(q, k, v)
    _refuse_tangents(q, k, v)
    scale = checked_scale(scale, q.shape[-1])
    out, lse = algorithm.forward(as_4d(q), as_4d(k), as_4d(v), bool(causal), scale)
    if q.ndim == 3:
        out, lse = out.squeeze(1), lse.squeeze(1)
    return (out, lse) if return_lse else out


def function_class(algorithm: Algorithm) -> Any:
    """Return the base of a class like `FlashAttentionTorch`, by that algorithm."""

    class FlashAttention(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False
        ) -> torch.Tensor:
            check(q, k, v)
            ctx.is_causal, ctx.scale = bool(is_causal), checked_scale(None, q.shape[-1])
            out, lse = algorithm.forward(as_4d(q), as_4d(k), as_4d(v), ctx.is_causal, ctx.scale)
            out, lse = out.view(q.shape), lse.view(q.shape[:-1])
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, *douts: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            q, k, v, out, lse = ctx.saved_tensors
            dout, *tensors = map(as_4d, (*douts, q, k, v, out))
            tensors.append(lse.view(tensors[-1].shape[:3]))
            gradients = algorithm.backward(
                dout, None, *tensors, ctx.is_causal, ctx.scale, *wanted(ctx)
            )
            needed = zip(gradients, (q, k, v), ctx.needs_input_grad[:3], strict=True)
            return *(grad.view(t.shape) if needs else None for grad, t, needs in needed), None

    return FlashAttention


class FlashAttentionTorch(function_class(TILED)):  # type: ignore[misc]  # a base made by a call
    """`FlashAttentionTorch.apply(q, k, v, is_causal=False) -> out`: `flash_attention` as a class.

    The form of Stanford CS336, assignment 2: among the saved tensors (q, k, v, output, LSE) one has
    the shape `[batch, seq_q]`, the LSE; with heads it is `[batch, heads, seq_q]`.
    """
