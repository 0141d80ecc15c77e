"""Activation checkpointing: what a layer keeps for its backward, and what it computes again.

    none       everything that autograd asks for
    full       the layer's input; the backward runs the whole layer a second time
    selective  the input, the result of every matrix product with weights, and of fused attention;
               the backward runs again what is cheap: norms, activations, rotations, reshapes

Selective is a choice by cost. Products with weights are nearly all of the work and grow with T;
scores of attention grow with T x T, which is why no mode but `none` ever keeps them: batched
products are made again, and fused attention keeps its output and one number per row.

Invariant. Gradients are those of `none` bit for bit: the same operations run on the same values,
once more. Autocast and random state are those of the first time (`torch.utils.checkpoint`).

The function that is wrapped is the *inside* of a layer's forward, so that a wrapper's hooks on the
layer (a gather of its parameters, say) run once and not again with it.

Paper: Chen et al. 2016; selective: Korthikanti et al. 2022, section 5.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

Runner = Callable[..., torch.Tensor]
"""`run(function, *arguments)`: calls the function, keeping what the mode says."""

_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.linear.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.trainspec.flash_attention_tiled.default,
    torch.ops.trainspec.flash_attention_triton.default,
}


def _policy(context: object, operation: object, *args: object, **kwargs: object) -> Any:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


MODES: dict[str, dict[str, Any] | None] = {
    "none": None,
    "full": {},
    "selective": {"context_fn": functools.partial(create_selective_checkpoint_contexts, _policy)},
}


def runner(mode: str) -> Runner:
    """Return the function that calls a layer in `mode`; ValueError if there is no such mode."""
    if mode not in MODES:
        raise ValueError(f"expected activation_checkpointing among {list(MODES)}, got {mode!r}")
    return functools.partial(_run, MODES[mode])


def _run(
    options: dict[str, Any] | None, function: Callable[..., torch.Tensor], *arguments: Any
) -> torch.Tensor:
    if options is None or not torch.is_grad_enabled():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, **options)
