"""One way to ask either model: what its config says decides which one it is."""

from __future__ import annotations

import functools
from typing import Any

from solution.attention import attention as attend
from solution.config import GPT2Config, ModelConfig, require_positive
from solution.models import gpt2, llama
from solution.models.gpt2 import GPT2
from solution.models.llama import Llama

ELEMENT_BYTES = 4


def build(
    config: ModelConfig, *, attention: str = "sdpa", activation_checkpointing: str = "none"
) -> GPT2 | Llama:
    """Build the model of that shape; `attention` is a backend of `solution.attention`."""
    kind: Any = GPT2 if isinstance(config, GPT2Config) else Llama
    function = functools.partial(attend, backend=attention)
    return kind(config, attention=function, activation_checkpointing=activation_checkpointing)


def parameter_count(config: ModelConfig) -> int:
    """Return how many parameters the model has; see the family's own file."""
    return _family(config).parameter_count(config)


def flops_per_token(config: ModelConfig, *, sequence_length: int) -> int:
    """Return the operations of forward and backward, matrix products only; see the same file."""
    return _family(config).flops_per_token(config, sequence_length=sequence_length)


def activation_bytes(config: ModelConfig, *, batch_size: int, sequence_length: int) -> int:
    """Return what forward and loss leave for the backward: fused attention, fp32, none recomputed.

    Per token and layer, in elements (E embedding, F width of the MLP, G width of keys, H heads):

        GPT-2                                   Llama
        input of the norm          E            input, scaled input, output of the norm    3 E
        its output                 E            queries, turned                              E
        queries, keys, values      3 E          keys, turned, and values                   2 G
        output of attention        E            output of attention                          E
        input, output of the norm  2 E          input, scaled input, output of the norm    3 E
        MLP before, after GELU     4 E + 4 E    gate, its SiLU, up, their product          4 F
        --------------------------------        -----------------------------------------------
                                   16 E                                    8 E + 2 G + 4 F

    and in both a logarithm per head (attention's LSE) and norms' statistics: mean and deviation
    where there is a mean, else one number. After the layers come the last norm and the logarithms
    of the probabilities, V per token; logits themselves are freed by then. GPT-2 keeps T positions
    (int64) for the backward of its embedding; the loss and the number of its targets are 4 bytes
    each.

    Exact to the byte on the CPU, where RMSNorm is made of single operations; a GPU has a fused one
    that keeps E less per norm. `solution.measure.memory` counts any model, dtype and checkpointing.

    Raises:
        ValueError: a size that is not a positive integer.

    >>> round(activation_bytes(GPT2Config(), batch_size=8, sequence_length=1024) / 2**20, 2)
    6232.6
    """
    require_positive("batch_size", batch_size)
    tokens = batch_size * require_positive("sequence_length", sequence_length)
    e, layers, norms = config.embedding_dim, config.num_layers, 2 * config.num_layers + 1
    loss_and_count = 2 * ELEMENT_BYTES
    if isinstance(config, GPT2Config):
        per_token = layers * (16 * e + config.num_heads) + 2 * e + 2 * norms
        positions = 8 * sequence_length
    else:
        kv = config.kv_heads * config.head_dim
        per_layer = 8 * e + 2 * kv + 4 * config.ffn_dim + config.num_heads
        per_token = layers * per_layer + 3 * e + norms
        positions = 0
    return ELEMENT_BYTES * tokens * (per_token + config.vocab_size) + positions + loss_and_count


def _family(config: ModelConfig) -> Any:
    return gpt2 if isinstance(config, GPT2Config) else llama
