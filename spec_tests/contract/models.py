"""The contract of what one rank computes: attention and a language model."""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

import torch
from torch import nn


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute exact attention in O(N) memory. `flash_attention_triton` uses Triton kernels.

    Args:
        q: `[batch, heads, seq_q, head_dim]`, or without `heads`.
        k, v: `[batch, kv_heads, seq_k, head_dim]`, or without `kv_heads`.
        causal: whether row i sees only the keys `j <= i + seq_k - seq_q` (aligned bottom-right).
        scale: any number; None means `head_dim ** -0.5`.
        return_lse: whether the natural log-sum-exp of each row is returned, too.

    Returns:
        The output in q's dtype, or (output, LSE). The LSE is `[batch, heads, seq_q]`.

    Level `course`:
        values: Output and gradients are those of `softmax(scale * q @ k.T) @ v`.
        lse-values: The LSE is the natural log-sum-exp of each row's scores.
        three-dims: Inputs `[batch, seq, head_dim]` are attention of one head.
        triton-causal: `flash_attention_triton` computes causal attention.
        triton-kernel: `flash_attention_triton` launches a Triton kernel.

    Level `correct`:
        causal: Causal attention is aligned bottom-right.
        not-causal: Without `causal` every row sees every key.
        scale: Any scale is taken, also zero and negative ones.
        any-size: Sizes may be any number from one on, up to a head dim of 256.
        any-strides: Inputs may have any strides.
        large-dims: A head dim above 256 is taken.
        float64: Inputs in float64 are taken.
        grouped: Query head h reads key head `h // (heads // kv_heads)`.
        rows-apart: A row depends on its own query and on the keys and values that it sees, no more.
        own-results: A result depends on its own call alone.
        lse-dtype: The LSE is float32, and float64 for float64.
        lse-gradient: The LSE is differentiable, or marked non-differentiable.
        one-rounding: Sums are float32 in every dtype; results are as good as one rounding.
        blind-rows: A row that sees no key gives zeros, an LSE of -inf, and zero gradients.
        forward-linear: The forward makes no matrix of scores.
        keeps-no-scores: The forward keeps no matrix of scores.
        inputs-stay: Inputs are not changed.
        saved-for-backward: A change in place of what the backward needs is noticed.
        second-derivative: A second derivative is right.
        transforms: The transforms of torch.func are right.
        wanted-gradients: Each input that requires a gradient gets one, and no other input does.
        streams: A call computes on the current stream of the device.
        in-bounds: A kernel loads and stores only within the tensors that it is passed.

    Level `production`:
        float32-products: Products of float32 keep its 24 bits, on tensor cores as well.
        backward-linear: The backward makes no matrix of scores.
        bad-inputs: Inputs that do not fit (dtypes, devices, shapes) are a ValueError naming one.
        empty: Sizes of zero give empty results, or those of rows that see no key.
        nan-comes-out: NaN in a query, key or value is NaN in each output row that depends on it.
        equal-runs: Equal inputs give equal bits of output, LSE and gradients, every time.
        kernel-race: In a launch an element is stored once; no program reads another's stores.
        work: Kernels compute two products in a forward and at most seven in a backward.
        hidden-tiles: At 256 keys, `causal` leaves 4/5 of the products at most, 9/10 of the loads.
        compile: `torch.compile(fullgraph=True)` compiles a call and changes no value.
        operators: Custom operators pass `torch.library.opcheck`.
        flops: `FlopCounterMode` counts 2 products forward, 4 to 7 backward (all or visible keys).
        autocast: Under `torch.autocast` results are as good as one rounding to its dtype.
        autocast-mixed: Under `torch.autocast` inputs of unequal dtypes are cast to its dtype.

    May be refused:
        large-dims: A head dim above 256.
        float64: Inputs in float64.
        second-derivative: A second derivative.
        transforms: A transform of torch.func.
        autocast-mixed: Inputs of unequal dtypes under `torch.autocast`, with a ValueError.
    """


flash_attention_triton = flash_attention


def language_model(
    *,
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    embedding_dim: int,
    max_sequence_length: int,
) -> nn.Module:
    """Build a decoder that maps ids `[batch, seq]` to logits `[batch, seq, vocab]`.

    The module takes `.double()` and `.eval()`. After `.double()` it may still compute in float32.

    Level `course`:
        shape: Logits are `[batch, seq, vocab]` for every `seq` up to `max_sequence_length`.
        causal: The logits at a place do not depend on later ids.
        sees-past: The logits at a place depend on the id there and on the ids before it.

    Level `correct`:
        rows-apart: The logits do not depend on the other sequences of the batch.
        sees-order: The logits depend on the order of the earlier ids.

    Level `production`:
        gradients: A loss over all places gives every trainable parameter a finite gradient.
    """
