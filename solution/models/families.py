"""Either model by its config: building it, and counting its parameters."""

import functools
from typing import Any

import torch

from solution.attention import attention as attend
from solution.config import GPT2Config, ModelConfig
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
    """Return the number of parameters, without making them; GPT-2's tied matrix counts once.

    >>> parameter_count(GPT2Config.preset("small"))
    124439808
    """
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(config).parameters())
