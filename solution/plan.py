"""A run whose every number is known before its first step, and which nothing speaks against.

What can be refused is refused here: batch sizes that do not divide, files that are no shards, ids
beyond the vocabulary, data that does not suffice for the steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from solution.attention import unavailable
from solution.config import ModelConfig
from solution.data.loader import TokenLoader, token_loader
from solution.data.prepare import read_meta
from solution.data.shards import Shard, find_shards
from solution.measure.recording import Recording, ShortRunError, require_free
from solution.models import families
from solution.optim import decay_groups
from solution.parallel.zero1 import ShardedOptimizer
from solution.step import DataExhaustedError
from solution.train_config import TrainConfig
from solution.trainer import accumulation_steps
from solution.world import World

__all__ = ["Plan"]

GPT2_VOCABULARY = 50257  # of shards that come without a tokenizer's word


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything about a run that follows from its config, its data and its place in the world."""

    name: str
    config: TrainConfig
    world: World
    model_config: ModelConfig
    sequence_length: int
    num_micro_batches: int
    loader: TokenLoader
    val_loader: TokenLoader | None  # None: nothing will be evaluated
    recording: Recording  # of the steps that a profiler watches; perhaps none

    @classmethod
    def of(cls, config: TrainConfig, world: World, *, name: str) -> Plan:
        """Check everything, derive the rest.

        Raises:
            ValueError: data, sizes or vocabulary that do not fit each other, or attention that
                cannot run here.
            DataExhaustedError: less data than the steps need.
        """
        reason = unavailable(config.attention, world.device.type)
        if reason is not None:
            raise ValueError(f"expected an attention that runs on {world.device.type}: {reason}")
        num_micro_batches = accumulation_steps(
            global_batch_size=config.global_batch_size,
            micro_batch_size=config.micro_batch_size,
            world_size=world.size,
        )
        meta = read_meta(Path(config.data)) or {"vocab_size": GPT2_VOCABULARY}
        model_config = config.model_config(vocab_size=config.vocab_size or meta["vocab_size"])
        length = config.sequence_length or model_config.max_sequence_length
        is_evaluating = config.eval_every is not None
        plan = cls(
            name=name,
            config=config,
            world=world,
            model_config=model_config,
            sequence_length=length,
            num_micro_batches=num_micro_batches,
            loader=_loader(config, world, length, "train"),
            val_loader=_loader(config, world, length, "val") if is_evaluating else None,
            recording=_recording(config, world, name),
        )
        plan._check_training_data()
        plan._check_validation_data()
        return plan

    @property
    def snapshot(self) -> Path | None:
        """Where the history of the GPU's memory goes; None where it is not asked for."""
        if not self.config.memory_snapshot:
            return None
        return self.recording.path.with_name(f"rank{self.world.rank}_snapshot.pickle")

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """AdamW; with `zero1` every rank keeps the state of a part of the parameters."""
        groups = decay_groups(module, weight_decay=self.config.weight_decay)
        if self.config.zero1:
            return ShardedOptimizer(groups, torch.optim.AdamW, lr=self.config.learning_rate)
        return torch.optim.AdamW(groups, lr=self.config.learning_rate)

    def _check_training_data(self) -> None:
        """Enough of it for the steps, and no id that the embedding lacks, in what will be read."""
        config, loader = self.config, self.loader
        possible = loader.num_batches // self.num_micro_batches
        if possible < config.steps:
            raise DataExhaustedError(
                f"expected data for {config.steps} steps of {config.global_batch_size} sequences, "
                f"got {loader.num_sequences} sequences of {self.sequence_length} tokens, enough "
                f"for {possible} steps; ask for fewer, or prepare more data"
            )
        self._check_vocabulary(loader.shards, config.steps * config.global_batch_size)

    def _check_validation_data(self) -> None:
        loader = self.val_loader
        if loader is None:
            return
        if not len(loader):
            raise ValueError(
                f"{self.config.data}: expected a validation batch of {loader.global_batch_size} "
                f"sequences, got {loader.num_sequences} of {self.sequence_length} tokens; prepare "
                "more data, or train without --eval-every"
            )
        self._check_vocabulary(loader.shards, self.config.eval_batches * loader.global_batch_size)

    def _check_vocabulary(self, shards: list[Shard], num_sequences: int) -> None:
        unread = num_sequences * self.sequence_length
        for shard in shards:
            if unread > 0:
                shard.check_vocabulary(self.model_config.vocab_size)
            unread -= len(shard)

    def announcement(self) -> str:
        """Every derived number, in a few lines."""
        config, loader = self.config, self.loader
        tokens = config.global_batch_size * self.sequence_length
        flops = families.flops_per_token(self.model_config, sequence_length=self.sequence_length)
        text = (
            f"{self.name}: {config.model} {config.size}, "
            f"{families.parameter_count(self.model_config):,} parameters, vocabulary "
            f"{self.model_config.vocab_size:,}, {flops / 1e6:,.1f} MFLOP/token, "
            f"{config.precision}; {self.world.size} rank(s) on {self.world.device.type}\n"
            f"  step: {config.global_batch_size} sequences = {self.num_micro_batches} micro-batches"
            f" x {config.micro_batch_size} x {self.world.size} rank(s) = {tokens:,} tokens\n"
            f"  data: {len(loader.shards)} shards, {loader.num_sequences:,} sequences of "
            f"{self.sequence_length}, {len(loader) // self.num_micro_batches:,} steps per "
            f"pass; {config.steps} steps, {config.steps * tokens:,} tokens"
        )
        if self.val_loader is not None:
            num_batches = min(config.eval_batches, len(self.val_loader))
            text += (
                f"\n  evaluation: every {config.eval_every} steps, "
                f"{num_batches * self.val_loader.global_batch_size} sequences"
            )
        return text


def _loader(config: TrainConfig, world: World, length: int, split: str) -> TokenLoader:
    return token_loader(
        find_shards(config.data, split),
        batch_size=config.micro_batch_size,
        sequence_length=length,
        rank=world.rank,
        world_size=world.size,
    )


def _recording(config: TrainConfig, world: World, name: str) -> Recording:
    """What will be recorded, refused here if it cannot be.

    Raises:
        ValueError: too few steps, no GPU for a memory snapshot, or an earlier run's files.
    """
    folder = Path(config.traces) / {"torch": "ddp_torch"}.get(name, name)
    if config.memory_snapshot:
        if world.device.type != "cuda":
            raise ValueError(
                f"expected a GPU for memory_snapshot, got {world.device.type}; leave it out, or "
                "see `python -m solution.memory_analysis`, which predicts"
            )
        require_free(folder, "rank*_snapshot.pickle")
    recording = Recording(
        folder, rank=world.rank, num_steps=config.profile_steps, device=world.device
    )
    try:
        recording.require(config.steps)
    except ShortRunError as error:
        raise ValueError(str(error)) from None
    return recording
