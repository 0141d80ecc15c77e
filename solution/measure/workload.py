"""One training step on one device, as the commands that measure take it from their flags."""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from solution.attention import unavailable
from solution.config import require_positive
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
        self.settings = settings = TrainConfig(**{"preset": preset} | given)
        names = ("attention", "activation_checkpointing")
        self._options = {name: getattr(settings, name) for name in names}
        self.batch_size = require_positive("batch_size", flags.batch_size)
        self.config = settings.model_config(vocab_size=settings.vocab_size)
        self.length = settings.sequence_length or min(1024, self.config.max_sequence_length)
        self.dtype = settings.dtype
        self.num_parameters = families.parameter_count(self.config)
        has_gpu = torch.cuda.is_available()
        if settings.device == "cuda" and is_run and not has_gpu:
            raise ValueError("expected a GPU for --device cuda, found none; predictions need none")
        kind = ("cuda" if has_gpu else "cpu") if settings.device == "auto" else settings.device
        self.device = torch.device(kind)
        if is_run and (reason := unavailable(settings.attention, kind)):
            raise ValueError(f"expected an attention that runs on {kind}: {reason}")

    @property
    def title(self) -> str:
        """Return what the step is, in a line."""
        given = self.settings
        return (
            f"{given.model} {given.preset}: {self.num_parameters:,} parameters, "
            f"{self.batch_size} x {self.length} tokens, AdamW, {given.precision}, "
            f"{given.attention}, checkpointing {given.activation_checkpointing}, {self.device.type}"
        )

    def build(self, batch_size: int) -> tuple[nn.Module, torch.Tensor]:
        """Return a model of random weights, and ids `[batch_size, length]`, on the device."""
        torch.manual_seed(0)
        with torch.device(self.device):
            model = families.build(self.config, **self._options)
            return model, torch.randint(self.config.vocab_size, (batch_size, self.length))

    def shape(self) -> nn.Module:
        """Return the model without memory, on the device `meta`."""
        with torch.device("meta"):
            return families.build(self.config, **self._options)

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
    said = "replaced" if path.exists() else "written"
    write_atomically(path, json.dumps(record, indent=2).encode() + b"\n")
    sys.stdout.write(f"{said}: {path.resolve()}\n")
