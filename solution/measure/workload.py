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
from solution.precision import PRECISIONS
from solution.train_config import TrainConfig

DONE, BAD_INPUT = 0, 2


def parser(program: str, description: str) -> argparse.ArgumentParser:
    """Return the parser of a command, with the flags of a workload."""
    flags = argparse.ArgumentParser(prog=f"python -m solution.{program}", description=description)
    flags.add_argument("--model", default="gpt2", help="gpt2 or llama")
    flags.add_argument("--preset", help="size (default: small, debug)")
    flags.add_argument("--vocab-size", type=int, help="words (default: the preset's)")
    flags.add_argument("--batch-size", type=int, default=8, help="sequences")
    flags.add_argument("--sequence-length", type=int, help="tokens (default: at most 1024)")
    flags.add_argument("--attention", default="sdpa", help="plain, tiled, triton or sdpa")
    flags.add_argument("--activation-checkpointing", default="none", help="full or selective")
    flags.add_argument("--precision", default="fp32", help="of the forward: fp32 or bf16")
    flags.add_argument("--device", default="auto", help="auto, cpu or cuda: to measure on")
    folder = Path("outputs", program.partition("_")[0])
    flags.add_argument("--out", type=Path, default=folder, help="folder")
    return flags


class Workload:
    """A training step: model, batch, precision, device.

    Args:
        flags: of `parser`.
        is_run: whether it will be run here, and not only predicted.
    """

    def __init__(self, flags: argparse.Namespace, *, is_run: bool = True) -> None:
        self.preset = flags.preset or ("small" if flags.model == "gpt2" else "debug")
        self.options = {
            "attention": flags.attention,
            "activation_checkpointing": flags.activation_checkpointing,
        }
        # One place for what is allowed: the training scripts' own checks.
        settings = TrainConfig(
            model=flags.model,
            preset=self.preset,
            sequence_length=flags.sequence_length,
            precision=flags.precision,
            device=flags.device,
            **self.options,
        )
        if flags.precision == "fp16":
            raise ValueError(
                "expected precision fp32 or bf16, got 'fp16', which needs a loss scale"
            )
        self.batch_size = require_positive("batch_size", flags.batch_size)
        vocabulary = flags.vocab_size or (50257 if flags.model == "gpt2" else 2048)
        self.config = settings.model_config(vocab_size=vocabulary)
        self.length = flags.sequence_length or min(1024, self.config.max_sequence_length)
        self.autocast = PRECISIONS[flags.precision]
        self.num_parameters = families.parameter_count(self.config)
        has_gpu = torch.cuda.is_available()
        if flags.device == "cuda" and is_run and not has_gpu:
            raise ValueError("expected a GPU for --device cuda, found none; predictions need none")
        kind = ("cuda" if has_gpu else "cpu") if flags.device == "auto" else flags.device
        self.device = torch.device(kind)
        if is_run and (reason := unavailable(flags.attention, kind)):
            raise ValueError(f"expected an attention that runs on {kind}: {reason}")

    def build(self, batch_size: int) -> tuple[nn.Module, torch.Tensor]:
        """Return a model of random weights, and ids `[batch_size, length]`, on the device."""
        torch.manual_seed(0)
        with torch.device(self.device):
            model = families.build(self.config, **self.options)
            return model, torch.randint(self.config.vocab_size, (batch_size, self.length))

    def predict(self, batch_size: int) -> Prediction:
        """Return what a step takes, without its memory."""
        with torch.device("meta"):
            model = families.build(self.config, **self.options)
        return predict(
            model,
            batch_size=batch_size,
            sequence_length=self.length,
            # What AdamW does on the device that is meant: many tensors at once on a GPU.
            make_optimizer=partial(torch.optim.AdamW, foreach=self.device.type == "cuda"),
            autocast=self.autocast,
        )


def keep(path: Path, record: dict[str, Any]) -> None:
    """Write a record as JSON, and say where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    said = "replaced" if path.exists() else "written"
    write_atomically(path, json.dumps(record, indent=2).encode() + b"\n")
    sys.stdout.write(f"{said}: {path.resolve()}\n")
