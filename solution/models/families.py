"""Either model by its config: building it, and what it counts and costs in closed form."""

import functools
from typing import Any

from solution.attention import attention as attend
from solution.config import GPT2Config, LlamaConfig, ModelConfig, require_positive
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
    """Return the number of parameters; GPT-2's tied matrix counts once.

    >>> parameter_count(GPT2Config.preset("small"))
    124439808
    >>> parameter_count(LlamaConfig.preset("debug")), parameter_count(LlamaConfig.preset("1b"))
    (6163712, 1498482688)
    """
    e, layers = config.embedding_dim, config.num_layers
    if isinstance(config, GPT2Config):
        # Biases of qkv 3, out 1, up 4, down 1, and two norms of 2; a final norm; the positions.
        rest = layers * 13 * e + 2 * e + config.max_sequence_length * e
    else:
        rest = (2 * layers + 1) * e + config.vocab_size * e  # norms; the embedding is a lookup
    return _multiplying_weights(config) + rest


def flops_per_token(config: ModelConfig, *, sequence_length: int) -> int:
    """Return the operations of a forward and a backward, per token; matrix products only.

    A product costs 2 per weight in the forward and 4 in the backward; attention's two products add
    12 L E T, not discounted for the causal half, and not fewer with fewer heads of keys and values.
    An embedding is a lookup. Equals `torch.utils.flop_counter` exactly. PaLM (Chowdhery et al.
    2022), appendix B, has 6N with norms and biases and lookups counted in.

    >>> flops_per_token(GPT2Config.preset("small"), sequence_length=1024)
    854438400
    >>> flops_per_token(LlamaConfig.preset("debug"), sequence_length=256)
    38535168
    """
    products = 12 * config.num_layers * config.embedding_dim * sequence_length
    return 6 * _multiplying_weights(config) + products


def _multiplying_weights(config: ModelConfig) -> int:
    """Return the elements of the matrices that multiply, the one of the logits included."""
    e = config.embedding_dim
    if isinstance(config, LlamaConfig):
        block = 2 * e * e + 2 * e * config.kv_heads * config.head_dim + 3 * e * config.ffn_dim
    else:
        block = 12 * e * e  # qkv 3, out 1, up 4, down 4
    return config.num_layers * block + config.vocab_size * e


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
