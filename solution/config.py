"""Settings of models: frozen dataclasses, and tables of presets.

`GPT2Config` and `LlamaConfig` describe the model, `TrainConfig` (in `solution.train_config`) the
run. Each checks its values when it is made.

    >>> GPT2Config.preset("small").embedding_dim
    768

Sizes of GPT-2: Radford et al. 2019, table 2, with the counts that the published weights have;
`tiny` is ours, for the CPU of a laptop. Sizes of Llama: those of the FSDP exercises; `1b` has the
shape of Llama 3.2 1B (Grattafiori et al. 2024), with a separate matrix for the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

Config = TypeVar("Config")

COMMON = ("max_sequence_length", "num_layers", "num_heads", "embedding_dim")
_GPT2_SIZES = {  # in the order of `COMMON`
    "tiny": (256, 4, 4, 128),  #       826,112 and 128 per word of the vocabulary
    "small": (1024, 12, 12, 768),  #   124,439,808
    "medium": (1024, 24, 16, 1024),  # 354,823,168
    "large": (1024, 36, 20, 1280),  #  774,030,080
    "xl": (1024, 48, 25, 1600),  #   1,557,611,200
}
PRESETS: dict[str, dict[str, Any]] = {
    name: dict(zip(COMMON, sizes, strict=True)) for name, sizes in _GPT2_SIZES.items()
}
LLAMA_PRESETS: dict[str, dict[str, Any]] = {
    "debug": {},  # 6,163,712: the defaults
    "1b": {  # 1,498,482,688
        "vocab_size": 128256,
        "max_sequence_length": 8192,
        "num_layers": 16,
        "num_heads": 32,
        "num_kv_heads": 8,
        "embedding_dim": 2048,
        "ffn_multiplier": 1.5,
        "ffn_multiple_of": 1024,
    },
}


@dataclass(frozen=True, kw_only=True)
class GPT2Config:
    """The shape of a GPT-2; the defaults are GPT-2 small.

    Raises:
        ValueError: a size is not a positive integer, or the heads do not divide the embedding.
    """

    vocab_size: int = 50257
    max_sequence_length: int = 1024
    num_layers: int = 12
    num_heads: int = 12
    embedding_dim: int = 768
    layer_norm_epsilon: float = 1e-5
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("vocab_size", *COMMON):
            require_positive(name, getattr(self, name))
        if self.embedding_dim % self.num_heads:
            raise ValueError(
                f"expected embedding_dim divisible by num_heads, got embedding_dim="
                f"{self.embedding_dim} and num_heads={self.num_heads}; choose num_heads from "
                f"{divisors(self.embedding_dim)}"
            )

    @classmethod
    def preset(cls, name: str, *, vocab_size: int | None = None) -> GPT2Config:
        """The preset `name` with that vocabulary; ValueError names the presets there are."""
        return _preset(cls, PRESETS, name, vocab_size)


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The shape of a Llama; the defaults are those of the preset `debug`.

    Attributes:
        num_kv_heads: heads of keys and values, each read by num_heads / num_kv_heads query heads;
            None is num_heads.
        ffn_multiplier, ffn_multiple_of: the MLP is 8/3 of the embedding wide (three matrices of
            that width weigh as much as two of 4), times the first, rounded up to the second.

    Raises:
        ValueError: a size is not a positive integer, the heads do not divide, or the heads are of
            odd width, which cannot be rotated in pairs.
    """

    vocab_size: int = 2048
    max_sequence_length: int = 2048
    num_layers: int = 6
    num_heads: int = 16
    num_kv_heads: int | None = None
    embedding_dim: int = 256
    ffn_multiplier: float = 1.0
    ffn_multiple_of: int = 256
    rope_theta: float = 500_000.0
    norm_epsilon: float = 1e-5
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("vocab_size", "ffn_multiple_of", *COMMON):
            require_positive(name, getattr(self, name))
        require_positive("num_kv_heads", self.kv_heads)
        for name in ("ffn_multiplier", "rope_theta"):
            require(name, getattr(self, name), "> 0", lambda value: value > 0)
        if self.embedding_dim % (2 * self.num_heads):
            raise ValueError(
                f"expected embedding_dim divisible by 2 * num_heads, got embedding_dim="
                f"{self.embedding_dim} and num_heads={self.num_heads}; choose num_heads from "
                f"{[d for d in divisors(self.embedding_dim) if self.embedding_dim % (2 * d) == 0]}"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"expected num_heads divisible by num_kv_heads, got {self.num_heads} and "
                f"{self.kv_heads}; choose num_kv_heads from {divisors(self.num_heads)}"
            )

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.embedding_dim // self.num_heads

    @property
    def ffn_dim(self) -> int:
        """Width of the MLP.

        >>> LlamaConfig.preset("debug").ffn_dim, LlamaConfig.preset("1b").ffn_dim
        (768, 8192)
        """
        width = int(self.ffn_multiplier * (8 * self.embedding_dim // 3))
        return -(-width // self.ffn_multiple_of) * self.ffn_multiple_of

    @classmethod
    def preset(cls, name: str, *, vocab_size: int | None = None) -> LlamaConfig:
        """The preset `name` with that vocabulary; ValueError names the presets there are."""
        return _preset(cls, LLAMA_PRESETS, name, vocab_size)


ModelConfig = GPT2Config | LlamaConfig


def _preset(
    cls: type[Config], presets: dict[str, dict[str, Any]], name: str, vocab_size: int | None
) -> Config:
    if name not in presets:
        raise ValueError(f"expected preset to be one of {list(presets)}, got {name!r}")
    return cls(**presets[name] | ({} if vocab_size is None else {"vocab_size": vocab_size}))


def require_positive(name: str, value: object) -> int:
    """Return `value` if it is a positive integer; otherwise raise a ValueError that names it."""
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"expected {name} to be a positive integer, got {value!r}")
    return value


def require(name: str, value: Any, what: str, holds: Callable[[Any], bool]) -> None:
    """Raise a ValueError that names the value, unless `holds(value)`; NaN compares false."""
    if not holds(value):
        raise ValueError(f"expected {name} {what}, got {value!r}")


def divisors(number: int) -> list[int]:
    """Return all divisors of `number`, ascending, for the advice in an error message.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [d for d in range(1, number + 1) if number % d == 0]
