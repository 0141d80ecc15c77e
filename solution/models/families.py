"""One way to ask either model: what its config says decides which one it is."""

from __future__ import annotations

import functools
from typing import Any

from solution.attention import attention as attend
from solution.config import GPT2Config, ModelConfig
from solution.models import gpt2, llama
from solution.models.gpt2 import GPT2
from solution.models.llama import Llama


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


def _family(config: ModelConfig) -> Any:
    return gpt2 if isinstance(config, GPT2Config) else llama
