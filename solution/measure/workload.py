"""One training step on one device, as the commands that measure take it from their flags."""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from solution.attention import unavailable
from solution.config import require_positive
from solution.console import say
from solution.data.shards import write_atomically
from solution.measure.memory import Prediction, predict
from solution.models import families
from solution.train_config import TrainConfig, add_flags

DONE, BAD_INPUT = 0, 2
SETTINGS = (
    *("model", "preset", "vocab_size", "sequence_length", "attention"),
    *("activation_checkpointing", "precision", "device"),
)


def parser(program: str, description: str) -> argparse.ArgumentParser:
    """Return the parser of a command: flags of the training scripts, batch size and folder."""
    description += " Defaults: gpt2 small or llama debug, their vocabulary, at most 1024 tokens."
    flags = argparse.ArgumentParser(prog=f"python -m solution.{program}", description=description)
    add_flags(flags, TrainConfig, *SETTINGS)
    flags.add_argument("--batch-size", type=int, default=8, help="sequences")
    folder = Path("outputs", program.partition("_")[0])
    flags.add_argument("--out", type=Path, default=folder, help="folder")
    return flags


class Workload:
    """A training step: model, batch, precision, device.

    Args:
        flags: of `parser`.
        is_run: whether it will be run here, and not only predicted.

    Raises:
        ValueError: a setting that cannot be.
    """

    def __init__(self, flags: argparse.Namespace, *, is_run: bool = True) -> None:
        given = {name: value for name, value in vars(flags).items() if name in SETTINGS}
        preset = "debug" if given.get("model") == "llama" else "small"
        settings = TrainConfig(**{"preset": preset} | given)
        self.batch_size = require_positive("batch_size", flags.batch_size)
        self.config = settings.model_config(vocab_size=settings.vocab_size)
        self.length = settings.sequence_length or min(1024, self.config.max_sequence_length)
        self.dtype = settings.dtype
        self.num_parameters = families.parameter_count(self.config)
        kind, has_gpu = settings.device, torch.cuda.is_available()
        if kind == "auto":
            kind = "cuda" if has_gpu else "cpu"
        if is_run and kind == "cuda" and not has_gpu:
            raise ValueError("expected a GPU for --device cuda, found none; predictions need none")
        if is_run and (reason := unavailable(settings.attention, kind)):
            raise ValueError(f"expected an attention that runs on {kind}: {reason}")
        self.device = torch.device(kind)
        self._build = partial(
            families.build,
            self.config,
            attention=settings.attention,
            activation_checkpointing=settings.activation_checkpointing,
        )
        self.title = (
            f"{settings.model} {settings.preset}: {self.num_parameters:,} parameters, "
            f"{self.batch_size} x {self.length} tokens, AdamW, {settings.precision}, "
            f"{settings.attention}, checkpointing {settings.activation_checkpointing}, {kind}"
        )

    def build(self, batch_size: int) -> tuple[nn.Module, torch.Tensor]:
        """Return a model of random weights, and ids `[batch_size, length]`, on the device."""
        torch.manual_seed(0)
        with torch.device(self.device):
            model = self._build()  # first: the numbers of a seed depend on the order of draws
            return model, torch.randint(self.config.vocab_size, (batch_size, self.length))

    def shape(self) -> nn.Module:
        """Return the model without memory, on the device `meta`."""
        with torch.device("meta"):
            return self._build()

    def predict(self, batch_size: int) -> Prediction:
        """Return what a step takes, without its memory."""
        return predict(
            self.shape(),
            batch_size=batch_size,
            sequence_length=self.length,
            # What AdamW does on the device that is meant: many tensors at once on a GPU.
            make_optimizer=partial(torch.optim.AdamW, foreach=self.device.type == "cuda"),
            dtype=self.dtype,
        )


def keep(path: Path, record: dict[str, Any]) -> None:
    """Write a record as JSON, and say where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(record, indent=2).encode() + b"\n")
    say(f"written: {path.resolve()}")
