"""What a run may be told: frozen dataclasses, one table of presets, strict parsing.

A setting has one home. `GPT2Config` says what the model is, `TrainConfig` what a training run does
with it; both check themselves when they are made, so that no later line has to. `parse` builds
either from a mapping (a TOML file, command-line flags) and refuses what it does not know: a
misspelt key that is silently ignored trains the wrong model for a day.

    >>> GPT2Config.preset("small").embedding_dim
    768
    >>> parse(GPT2Config, {"num_layer": 3})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: GPT2Config has no field 'num_layer' (did you mean 'num_layers'?); valid fields: ...

Sizes: Radford et al. 2019, table 2, with the counts that the published weights have. `tiny` is
ours, for the CPU of a laptop.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

__all__ = ["PRESETS", "GPT2Config", "TrainConfig", "divisors", "parse", "require_positive"]

Config = TypeVar("Config")

PRESETS: dict[str, dict[str, int]] = {
    name: dict(
        zip(("max_sequence_length", "num_layers", "num_heads", "embedding_dim"), sizes, strict=True)
    )
    for name, sizes in {
        "tiny": (256, 4, 4, 128),  #       826,112 and 128 per word of the vocabulary
        "small": (1024, 12, 12, 768),  #   124,439,808
        "medium": (1024, 24, 16, 1024),  # 354,823,168
        "large": (1024, 36, 20, 1280),  #  774,030,080
        "xl": (1024, 48, 25, 1600),  #   1,557,611,200
    }.items()
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
        for name in (
            "vocab_size",
            "max_sequence_length",
            "num_layers",
            "num_heads",
            "embedding_dim",
        ):
            require_positive(name, getattr(self, name))
        if self.embedding_dim % self.num_heads:
            raise ValueError(
                f"expected embedding_dim divisible by num_heads, got embedding_dim="
                f"{self.embedding_dim} and num_heads={self.num_heads}; choose num_heads from "
                f"{divisors(self.embedding_dim)}"
            )

    @classmethod
    def preset(cls, name: str, *, vocab_size: int = 50257) -> GPT2Config:
        """The preset `name` with that vocabulary; ValueError names the presets there are."""
        if name not in PRESETS:
            raise ValueError(f"expected preset to be one of {list(PRESETS)}, got {name!r}")
        return cls(vocab_size=vocab_size, **PRESETS[name])


def _setting(default: Any, text: str) -> Any:
    """A dataclass field whose `text` becomes the help of its command-line flag."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run. Batch sizes count sequences; a step is one update of the optimizer.

    Raises:
        ValueError: a value outside its range, with the field, the value and what is allowed.
    """

    preset: str = _setting("tiny", "model size: " + ", ".join(PRESETS))
    data: str = _setting("outputs/data", "folder with *train*.bin token shards")
    out: str = _setting("outputs/run", "folder for the log (JSONL) and the summaries (JSON)")
    vocab_size: int | None = _setting(None, "words (default: the data's tokenizer, else 50257)")
    sequence_length: int | None = _setting(None, "tokens per sequence (default: the preset's)")
    steps: int = _setting(20, "optimizer steps")
    global_batch_size: int = _setting(32, "sequences per optimizer step, all ranks together")
    micro_batch_size: int = _setting(8, "sequences per backward on one rank")
    learning_rate: float = _setting(3e-4, "peak learning rate; falls as a cosine to a tenth of it")
    warmup_steps: int = _setting(0, "steps of linear warm-up")
    weight_decay: float = _setting(0.1, "AdamW's decay, on matrices and embeddings only")
    max_norm: float | None = _setting(None, "clip the global gradient norm to this (default: no)")
    seed: int = _setting(42, "of the initial weights, the same on every rank")
    log_every: int = _setting(1, "steps between log lines; the first and the last always appear")
    device: str = _setting("auto", "auto, cpu or cuda")
    wrapper: str = _setting("ddp_bucketed", "how gradients are reduced (train_ddp only)")
    bucket_size_mb: float = _setting(25.0, "of ddp_bucketed and torch, in MiB")

    devices: ClassVar[tuple[str, ...]] = ("auto", "cpu", "cuda")
    wrappers: ClassVar[tuple[str, ...]] = ("ddp", "ddp_bucketed", "torch")

    def __post_init__(self) -> None:
        for name in ("steps", "global_batch_size", "micro_batch_size", "log_every"):
            require_positive(name, getattr(self, name))
        for name in ("vocab_size", "sequence_length"):
            require_positive(name, 1 if getattr(self, name) is None else getattr(self, name))
        for name in ("learning_rate", "bucket_size_mb", "max_norm"):
            _require(name, getattr(self, name), "> 0", lambda value: value is None or value > 0)
        for name in ("warmup_steps", "weight_decay"):
            _require(name, getattr(self, name), ">= 0", lambda value: value >= 0)
        at_most = f"<= steps={self.steps}"
        _require("warmup_steps", self.warmup_steps, at_most, lambda value: value <= self.steps)
        _require("device", self.device, f"among {self.devices}", self.devices.__contains__)
        _require("wrapper", self.wrapper, f"among {self.wrappers}", self.wrappers.__contains__)

    def model(self, *, vocab_size: int) -> GPT2Config:
        """The model of this run; a sequence_length beyond the preset's is refused here."""
        config = GPT2Config.preset(self.preset, vocab_size=vocab_size)
        length = self.sequence_length or config.max_sequence_length
        if length > config.max_sequence_length:
            raise ValueError(
                f"expected sequence_length <= {config.max_sequence_length} for preset "
                f"{self.preset!r}, got {length}; use a shorter one or a larger preset"
            )
        return config


def parse(cls: type[Config], settings: Mapping[str, Any]) -> Config:
    """Build the dataclass `cls` from `settings`, strictly.

    Args:
        cls: a dataclass whose fields are int, float, str, bool, or one of them or None.
        settings: field names to values. Strings are converted, as flags and environment have them.

    Raises:
        ValueError: an unknown key (names the valid ones), a value of another type, or what `cls`
            itself refuses.
    """
    hints = typing.get_type_hints(cls)
    valid = [f.name for f in dataclasses.fields(typing.cast(Any, cls))]
    values = {}
    for key, value in settings.items():
        if key not in valid:
            close = difflib.get_close_matches(key, valid, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(
                f"{cls.__name__} has no field {key!r}{hint}; valid fields: {', '.join(valid)}"
            )
        values[key] = _convert(f"{cls.__name__}.{key}", value, hints[key])
    return cls(**values)


def _convert(name: str, value: Any, hint: Any) -> Any:
    """`value` as the type `hint`: strings are read, ints widen to float, nothing else changes."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in kinds:
        return None
    kind = next(k for k in kinds if k is not type(None))
    if kind is bool and isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    # bool is an int to Python; a flag that was meant as a count is a mistake to us.
    if type(value) is kind or (kind is float and type(value) is int):
        return kind(value)
    if isinstance(value, str) and kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            pass
    raise ValueError(f"expected {name} to be {kind.__name__}, got {value!r}")


def require_positive(name: str, value: object) -> int:
    """`value` if it is an integer above zero; otherwise a ValueError that names it."""
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"expected {name} to be a positive integer, got {value!r}")
    return value


def _require(name: str, value: Any, what: str, holds: Callable[[Any], bool]) -> None:
    # Written so that NaN, which compares false with everything, is refused.
    if not holds(value):
        raise ValueError(f"expected {name} {what}, got {value!r}")


def divisors(number: int) -> list[int]:
    """All divisors of `number`, ascending: what an error about divisibility offers instead.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [d for d in range(1, number + 1) if number % d == 0]
