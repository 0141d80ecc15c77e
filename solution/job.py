"""One training job, from flags to summary: what `train_baseline` and `train_ddp` share.

1. Flags (and a TOML file, `--config`) become a `TrainConfig`; unknown keys are errors.
2. Everything that can be refused is refused before the first step: files, divisibility, ids beyond
   the vocabulary, too little data for the steps. A refusal is one line and exit status 2.
3. Every rank seeds alike, builds the same GPT-2 and wraps it; rank r reads its part of the data.
4. Rank 0 prints `step | loss | lr | time | tokens/s | grad norm` and writes OUT/NAME.jsonl, one
   line per step. The traffic of one step is counted, and that step is left out of the timing.
5. Every rank writes OUT/NAME.rankR.json: throughput, reductions and bytes, peak memory, fingerprint
   of the final weights.

Exit status: 0 done, 1 training stopped (data ended, loss not finite), 2 bad input.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import statistics
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from solution import comm
from solution.config import ModelConfig, parse
from solution.console import progress_bar
from solution.data.loader import TokenLoader, token_loader
from solution.data.prepare import read_meta
from solution.data.shards import find_shards, write_atomically
from solution.measure.memory import peak_memory_bytes
from solution.measure.traffic import Traffic
from solution.models import families
from solution.optim import cosine_schedule, decay_groups
from solution.train_config import TrainConfig
from solution.trainer import (
    DataExhaustedError,
    NonFiniteError,
    StepRecord,
    accumulation_steps,
    training_steps,
)

__all__ = ["Wrap", "main"]

Wrap = Callable[[nn.Module, TrainConfig, comm.World], nn.Module]
GPT2_VOCABULARY = 50257
COUNTED_STEP = 2  # the third: PyTorch's DDP settles its buckets after the first


def main(
    wrap: Wrap,
    *,
    name: str | None,
    description: str,
    arguments: Sequence[str] | None = None,
) -> int:
    """The command of an entry script.

    Args:
        wrap: puts the model into what reduces its gradients.
        name: of the files written; None takes the wrapper's.
        description: for `--help`.
        arguments: instead of the command line's.

    Returns:
        The exit status.
    """
    flags = _parser(description).parse_args(arguments)
    where, job = "", None
    try:
        config = _config(flags)
        with comm.distributed(device=None if config.device == "auto" else config.device) as world:
            where = f"[rank {world.rank}] " if world.size > 1 else ""
            job = Job.of(config, world, name=name or config.wrapper)
            if world.is_first:
                _say(job.announcement())
            return 0 if flags.dry_run else job.run(wrap)
    except (DataExhaustedError, NonFiniteError) as error:
        _complain(where, error)
        return 1
    except (ValueError, OSError) as error:
        if job is not None:  # not what was asked for is wrong: whoever repairs it needs the stack
            raise
        _complain(where, error)
        return 2


def _parser(description: str) -> argparse.ArgumentParser:
    """One flag per field of TrainConfig, with its help and default."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    for field in dataclasses.fields(TrainConfig):
        flag = "--" + field.name.replace("_", "-")
        text = f"{field.metadata['help']} (default: {field.default})"
        parser.add_argument(flag, default=argparse.SUPPRESS, help=text)
    parser.add_argument("--config", type=Path, help="TOML file of these settings; flags win")
    parser.add_argument("--dry-run", action="store_true", help="check, say the numbers, and stop")
    return parser


def _config(flags: argparse.Namespace) -> TrainConfig:
    settings = {k: v for k, v in vars(flags).items() if k not in ("config", "dry_run")}
    if flags.config is not None:
        try:
            settings = tomllib.loads(flags.config.read_text()) | settings
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{flags.config}: expected TOML, got {error}") from None
    return parse(TrainConfig, settings)


@dataclass(frozen=True)
class Job:
    """A run whose every number is known and which nothing speaks against.

    Raises (from `of`):
        ValueError: data, sizes or vocabulary that do not fit each other.
    """

    name: str
    config: TrainConfig
    model_config: ModelConfig
    sequence_length: int
    loader: TokenLoader
    num_micro_batches: int
    world: comm.World

    @classmethod
    def of(cls, config: TrainConfig, world: comm.World, *, name: str) -> Job:
        """Check everything, derive the rest."""
        num_micro_batches = accumulation_steps(
            global_batch_size=config.global_batch_size,
            micro_batch_size=config.micro_batch_size,
            world_size=world.size,
        )
        paths = find_shards(config.data, "train")
        meta = read_meta(Path(config.data)) or {"vocab_size": GPT2_VOCABULARY}
        model_config = config.model_config(vocab_size=config.vocab_size or meta["vocab_size"])
        sequence_length = config.sequence_length or model_config.max_sequence_length
        loader = token_loader(
            paths,
            batch_size=config.micro_batch_size,
            sequence_length=sequence_length,
            rank=world.rank,
            world_size=world.size,
        )
        job = cls(name, config, model_config, sequence_length, loader, num_micro_batches, world)
        job._check_data()
        return job

    def _check_data(self) -> None:
        """Enough data for the steps, and no id that the embedding lacks, in what will be read."""
        config, loader = self.config, self.loader
        possible = loader.num_batches // self.num_micro_batches
        if possible < config.steps:
            raise ValueError(
                f"expected data for {config.steps} steps of {config.global_batch_size} sequences, "
                f"got {loader.num_sequences} sequences of {self.sequence_length} tokens, enough "
                f"for {possible} steps; ask for fewer, or prepare more data"
            )
        unread = config.steps * config.global_batch_size * self.sequence_length
        for shard in loader.shards:
            if unread > 0:
                shard.check_vocabulary(self.model_config.vocab_size)
            unread -= len(shard)

    def announcement(self) -> str:
        """Every derived number, before anything is computed."""
        config, loader = self.config, self.loader
        tokens = config.global_batch_size * self.sequence_length
        flops = families.flops_per_token(self.model_config, sequence_length=self.sequence_length)
        return (
            f"{self.name}: {config.model} {config.size}, "
            f"{families.parameter_count(self.model_config):,} parameters, vocabulary "
            f"{self.model_config.vocab_size:,}, {flops / 1e6:,.1f} MFLOP/token; "
            f"{self.world.size} rank(s) on {self.world.device.type}\n"
            f"  step: {config.global_batch_size} sequences = {self.num_micro_batches} micro-batches"
            f" x {config.micro_batch_size} x {self.world.size} rank(s) = {tokens:,} tokens\n"
            f"  data: {len(loader.shards)} shards, {loader.num_sequences:,} sequences of "
            f"{self.sequence_length}, {loader.num_batches // self.num_micro_batches:,} steps per "
            f"pass; {config.steps} steps, {config.steps * tokens:,} tokens"
        )

    # --- the run

    def run(self, wrap: Wrap) -> int:
        """Train, log, and write this rank's summary; returns the exit status."""
        config = self.config
        torch.manual_seed(config.seed)
        module = families.build(
            self.model_config, activation_checkpointing=config.activation_checkpointing
        ).to(self.world.device)
        optimizer = torch.optim.AdamW(
            decay_groups(module, weight_decay=config.weight_decay), lr=config.learning_rate
        )
        steps = training_steps(
            wrap(module, config, self.world),
            optimizer,
            self.loader,
            steps=config.steps,
            global_batch_size=config.global_batch_size,
            micro_batch_size=config.micro_batch_size,
            max_norm=config.max_norm,
            lr=cosine_schedule(
                config.learning_rate, num_steps=config.steps, warmup_steps=config.warmup_steps
            ),
        )
        out = Path(config.out)
        out.mkdir(parents=True, exist_ok=True)
        path = out / f"{self.name}.rank{self.world.rank}.json"
        path.unlink(missing_ok=True)  # an earlier run's must not vouch for this one
        traffic = Traffic()
        times = self._log_steps(steps, traffic, out)
        summary = self._summary(module, times, traffic)
        write_atomically(path, json.dumps(summary, indent=2).encode() + b"\n")
        if self.world.is_first:
            _say(
                f"  done: {summary['tokens_per_s']:,.0f} tokens/s (median, all ranks), "
                f"{summary['reductions_per_step']} reductions, {summary['bytes_per_step']:,} "
                f"bytes per step, peak {summary['peak_memory_bytes'] / 2**20:,.0f} MiB; {path}"
            )
        return 0

    def _log_steps(self, steps: Iterator[StepRecord], traffic: Traffic, out: Path) -> list[float]:
        """Run all steps; rank 0 logs them. Returns the seconds of those that are typical."""
        counted = min(COUNTED_STEP, self.config.steps - 1)
        times = []
        with contextlib.ExitStack() as stack:
            log = None
            if self.world.is_first:
                log = stack.enter_context((out / f"{self.name}.jsonl").open("w"))
            for index in range(self.config.steps):
                started = time.perf_counter()
                with traffic if index == counted else contextlib.nullcontext():
                    record = next(steps)
                seconds = time.perf_counter() - started
                times.append(seconds)
                if log is not None:
                    self._log(record, seconds, log)
        # The first step warms up and the counted one is slowed down by being watched.
        return [s for index, s in enumerate(times) if index not in (0, counted)] or times

    def _log(self, record: StepRecord, seconds: float, log: Any) -> None:
        rate = record["tokens"] / seconds
        line = {**record, "tokens_per_s": round(rate, 1), "step_s": round(seconds, 6)}
        log.write(json.dumps(line) + "\n")
        log.flush()  # what a killed run did must be readable
        progress_bar(0, 0)
        if record["step"] in (1, self.config.steps) or record["step"] % self.config.log_every == 0:
            _say(
                f"step {record['step']:5d} | loss {record['loss']:.6f} | lr {record['lr']:.2e} | "
                f"time {seconds:.3f} s | {rate:,.0f} tokens/s | grad norm {record['grad_norm']:.4f}"
            )
        progress_bar(record["step"], self.config.steps, f"loss {record['loss']:.3f}")

    def _summary(self, module: nn.Module, times: list[float], traffic: Traffic) -> dict[str, Any]:
        """What this rank has to say; throughput is over all ranks, of the median step."""
        tokens = self.config.global_batch_size * self.sequence_length
        dtype = next(module.parameters()).dtype  # the trainer's own counts are float64
        return {
            "name": self.name,
            "rank": self.world.rank,
            "world_size": self.world.size,
            "device": str(self.world.device),
            "tokens_per_s": tokens / statistics.median(times),
            "reductions_per_step": traffic.count(dtype),
            "bytes_per_step": traffic.num_bytes(dtype),
            "control_messages_per_step": traffic.count() - traffic.count(dtype),
            "control_bytes_per_step": traffic.num_bytes() - traffic.num_bytes(dtype),
            "peak_memory_bytes": peak_memory_bytes(self.world.device),
            "parameter_bytes": sum(p.numel() * p.element_size() for p in module.parameters()),
            "weights_sha256": _fingerprint(module),
            "config": dataclasses.asdict(self.config),
        }


def _fingerprint(module: nn.Module) -> str:
    """A hash of all parameters, names and bits: equal exactly when the weights are."""
    digest = hashlib.sha256()
    for name, parameter in module.named_parameters():
        data = parameter.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(name.encode() + data.numpy().tobytes())
    return digest.hexdigest()


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _complain(where: str, error: Exception) -> None:
    sys.stderr.write(f"{where}error: {error}\n")
