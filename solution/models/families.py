"""One way to ask either model: what its config says decides which one it is."""

from __future__ import annotations

import functools

from solution.attention import attention as attend
from solution.config import GPT2Config, ModelConfig
from solution.models import gpt2, llama
from solution.models.gpt2 import GPT2
from solution.models.llama import Llama

__all__ = ["build", "flops_per_token", "parameter_count"]


def build(
    config: ModelConfig, *, attention: str = "sdpa", activation_checkpointing: str = "none"
) -> GPT2 | Llama:
    """The model of that shape; `attention` is a backend of `solution.attention`."""
    function = functools.partial(attend, backend=attention)
    if isinstance(config, GPT2Config):
        return GPT2(config, attention=function, activation_checkpointing=activation_checkpointing)
    return Llama(config, attention=function, activation_checkpointing=activation_checkpointing)


def parameter_count(config: ModelConfig) -> int:
    """How many parameters it has; see the model's own file."""
    if isinstance(config, GPT2Config):
        return gpt2.parameter_count(config)
    return llama.parameter_count(config)


def flops_per_token(config: ModelConfig, *, sequence_length: int) -> int:
    """Forward and backward, matrix products only; see the model's own file."""
    if isinstance(config, GPT2Config):
        return gpt2.flops_per_token(config, sequence_length=sequence_length)
    return llama.flops_per_token(config, sequence_length=sequence_length)
