"""Settings of one training run: every field is a flag of the entry scripts, with its help.

The size of the vocabulary is left open here: `solution.job` takes it from the data.
"""

import argparse
import dataclasses
import typing
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from solution.config import (
    LLAMA_PRESETS,
    PRESETS,
    GPT2Config,
    LlamaConfig,
    ModelConfig,
    require,
    require_positive,
)


def setting(default: Any, text: str, *among: str) -> Any:
    """Return a dataclass field, one of `among` if given; `text` and they are its flag's help."""
    words = f"{text}: {', '.join(among)}" if among else text
    return field(default=default, metadata={"help": words, "among": among})


def add_flags(parser: argparse.ArgumentParser, kind: Any, *only: str) -> None:
    """Add a flag for each setting of a config, or some of them; what is not given stays absent."""
    hints = typing.get_type_hints(kind)
    for each in dataclasses.fields(kind):
        if not only or each.name in only:
            of = (typing.get_args(hints[each.name]) or (hints[each.name],))[0]  # or None
            text = f"{each.metadata['help']} (default: {each.default})"
            how: Any = {"action": argparse.BooleanOptionalAction} if of is bool else {"type": of}
            flag = "--" + each.name.replace("_", "-")
            parser.add_argument(flag, default=argparse.SUPPRESS, help=text, **how)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run. Batch sizes count sequences; a step is one update of the optimizer.

    Raises:
        ValueError: a value outside its range, with the field, the value and what is allowed.
    """

    model: str = setting("gpt2", "family", "gpt2", "llama")
    preset: str | None = setting(
        None, f"size: of gpt2 {', '.join(PRESETS)}; of llama {', '.join(LLAMA_PRESETS)}; the first"
    )
    data: str = setting("outputs/data", "folder with *_train_*.bin token shards")
    out: str = setting("outputs/run", "folder for the log (JSONL) and the summaries (JSON)")
    vocab_size: int | None = setting(None, "words (default: the data's tokenizer, else 50257)")
    sequence_length: int | None = setting(None, "tokens per sequence (default: the preset's)")
    steps: int = setting(20, "optimizer steps")
    global_batch_size: int = setting(32, "sequences per optimizer step, all ranks together")
    micro_batch_size: int = setting(8, "sequences per backward on one rank")
    learning_rate: float = setting(3e-4, "peak learning rate; falls as a cosine to a tenth of it")
    warmup_steps: int = setting(0, "steps of linear warm-up")
    weight_decay: float = setting(0.1, "AdamW's decay, on matrices and embeddings only")
    max_norm: float | None = setting(None, "clip the global gradient norm to this (default: no)")
    precision: str = setting("fp32", "of the forward; weights stay fp32", "fp32", "bf16")
    attention: str = setting("sdpa", "who computes it", "plain", "tiled", "triton", "sdpa")
    activation_checkpointing: str = setting(
        "none", "what the backward computes again", "none", "full", "selective"
    )
    eval_every: int | None = setting(
        None, "steps between evaluations on the *_val_*.bin shards; the last step is one, too"
    )
    eval_batches: int = setting(8, "micro-batches per rank of one evaluation, at most")
    seed: int = setting(42, "of the initial weights, the same on every rank")
    checkpoint_dir: str | None = setting(
        None, "folder to save to, and to go on from where it holds a checkpoint"
    )
    save_every: int | None = setting(None, "steps between saves; the last step is one, too")
    keep: int | None = setting(None, "checkpoints that stay, the newest (default: all)")
    log_every: int = setting(1, "steps between log lines; the first and the last always appear")
    profile_steps: int = setting(0, "steps to record with torch.profiler, after 3 of warm-up")
    traces: str = setting("outputs/traces", "folder for TRACES/SETUP/rankN_trace.json")
    memory_snapshot: bool = setting(False, "record the GPU's memory for pytorch.org/memory_viz")
    device: str = setting("auto", "where it runs", "auto", "cpu", "cuda")

    name = "baseline"  # of the files that this run writes
    zero1 = False  # whether AdamW's state is divided over the ranks

    @classmethod
    def from_command_line(cls, description: str) -> tuple[Self, bool]:
        """Return the config of the flags, one per field; and whether `--dry-run` is one of them.

        Raises:
            ValueError: a value that is refused.
        """
        parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
        add_flags(parser, cls)
        parser.add_argument("--dry-run", action="store_true", help="check, say the numbers, stop")
        settings = vars(parser.parse_args())
        is_dry_run = settings.pop("dry_run")
        return cls(**settings), is_dry_run

    def __post_init__(self) -> None:
        for name in (
            *("steps", "global_batch_size", "micro_batch_size", "log_every", "eval_batches"),
            *("vocab_size", "sequence_length", "eval_every", "save_every", "keep"),
        ):
            if getattr(self, name) is not None:
                require_positive(name, getattr(self, name))
        for name in ("learning_rate", "max_norm"):
            require(name, getattr(self, name), "> 0", lambda value: value is None or value > 0)
        for name in ("warmup_steps", "weight_decay", "profile_steps"):
            require(name, getattr(self, name), ">= 0", lambda value: value >= 0)
        at_most = f"<= steps={self.steps}"
        require("warmup_steps", self.warmup_steps, at_most, lambda value: value <= self.steps)
        for each in dataclasses.fields(self):
            if among := each.metadata["among"]:
                require(each.name, getattr(self, each.name), f"among {among}", among.__contains__)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of a forward's matrix products."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @property
    def size(self) -> str:
        """The preset: the smallest where none was named."""
        return self.preset or next(iter(PRESETS if self.model == "gpt2" else LLAMA_PRESETS))

    def model_config(self, *, vocab_size: int | None) -> ModelConfig:
        """Return the model's config, with the preset's vocabulary where `vocab_size` is None.

        Raises:
            ValueError: a sequence_length beyond the preset's.
        """
        kind = GPT2Config if self.model == "gpt2" else LlamaConfig
        config: ModelConfig = kind.preset(self.size, vocab_size=vocab_size)
        length = self.sequence_length or config.max_sequence_length
        if length > config.max_sequence_length:
            raise ValueError(
                f"expected sequence_length <= {config.max_sequence_length} for preset "
                f"{self.size!r}, got {length}; use a shorter one or a larger preset"
            )
        return config
