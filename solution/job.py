"""One training job, from flags to summary: what all `train_*` scripts share.

1. Flags become a `TrainConfig`; unknown ones are errors.
2. `Job` derives every number, and refuses what can be refused before the first step, in one line:
   sizes that do not divide, files that are no shards, ids beyond the vocabulary, too little data.
   `--dry-run` ends there.
3. `solution.train_baseline.train` builds the same model on every rank, wraps it and trains.
4. Rank 0 keeps the log (`solution.runlog`). The traffic of one step is counted.
5. Every rank writes OUT/NAME.rankR.json: throughput, messages and bytes of a step, memory, and a
   fingerprint of the final weights. Rank 0 prints the main ones.
6. With `--profile-steps` it records some steps (`solution.measure.recording`): one file per rank,
   TRACES/SETUP/rankN_trace.json, for `python -m solution.analyze_traces`.
7. With `--checkpoint-dir` it saves, resumes, and stops on SIGTERM (`solution.resume`).

Exit status: 0 done, 1 failed, 2 bad input, 3 out of data, 4 told to stop, and saved. (torchrun
itself reports any of them as 1, and says which in its last lines.)
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from solution.attention import unavailable
from solution.checkpoint import CheckpointError
from solution.console import significant
from solution.data.loader import TokenLoader, token_loader
from solution.data.prepare import read_meta
from solution.data.shards import find_shards, write_atomically
from solution.measure.memory import memory_history, optimizer_tensors, peak_memory_bytes
from solution.measure.recording import Recording, ShortRunError, require_free
from solution.measure.trace import listed
from solution.measure.traffic import Traffic
from solution.models.families import parameter_count
from solution.optim import cosine_schedule, decay_groups
from solution.parallel.agreement import on_all_ranks
from solution.parallel.fsdp.api import full_parameters
from solution.parallel.zero1 import ShardedOptimizer
from solution.runlog import RunLog, say
from solution.train_config import TrainConfig
from solution.trainer import DataExhaustedError, NonFiniteError, accumulation_steps, evaluate
from solution.world import World, distributed

COUNTED_STEP = 2  # the third: PyTorch's DDP settles its buckets after the first
GPT2_VOCABULARY = 50257  # of shards that come without a tokenizer's word
DONE, FAILED, BAD_INPUT, OUT_OF_DATA, INTERRUPTED = range(5)


class Interrupted(RuntimeError):
    """The run was told to stop, and has saved what it had."""


STATUS: dict[type[Exception], int] = {
    Interrupted: INTERRUPTED,
    DataExhaustedError: OUT_OF_DATA,
    ShortRunError: BAD_INPUT,
    NonFiniteError: FAILED,
    CheckpointError: FAILED,
}
REPORTED: tuple[type[Exception], ...] = (*STATUS, ValueError, OSError)


class Job:
    """One run on one rank: what follows from its config, its data and its place in the world.

    Raises:
        ValueError: data, sizes or vocabulary that do not fit each other, or attention that cannot
            run here.
        DataExhaustedError, ShortRunError: less data or steps than are needed.
    """

    def __init__(self, config: TrainConfig, world: World, *, name: str) -> None:
        self.config, self.world = config, world
        self.name = name  # of the files that it writes
        if reason := unavailable(config.attention, world.device.type):
            raise ValueError(f"expected an attention that runs on {world.device.type}: {reason}")
        self.num_micro_batches = accumulation_steps(  # of a step, on each rank
            global_batch_size=config.global_batch_size,
            micro_batch_size=config.micro_batch_size,
            world_size=world.size,
        )
        meta = read_meta(Path(config.data)) or {"vocab_size": GPT2_VOCABULARY}
        self.model_config = config.model_config(vocab_size=config.vocab_size or meta["vocab_size"])
        self.sequence_length = config.sequence_length or self.model_config.max_sequence_length
        self.loader = self._loader("train")
        self.val_loader = None if config.eval_every is None else self._loader("val")
        self.learning_rate = cosine_schedule(
            config.learning_rate, num_steps=config.steps, warmup_steps=config.warmup_steps
        )
        self.recording = self._recording()
        self.seconds: list[float] = []  # of each step that this process took
        self.val_loss: float | None = None  # the newest
        self._traffic = Traffic()
        self._check_data()

    def _loader(self, split: str) -> TokenLoader:
        return token_loader(
            find_shards(self.config.data, split),
            batch_size=self.config.micro_batch_size,
            sequence_length=self.sequence_length,
            rank=self.world.rank,
            world_size=self.world.size,
        )

    def _recording(self) -> Recording:
        """Refuse what cannot be recorded: too few steps, no GPU, an earlier run's files."""
        config, world = self.config, self.world
        folder = Path(config.traces) / {"torch": "ddp_torch"}.get(self.name, self.name)
        if config.memory_snapshot:
            if world.device.type != "cuda":
                raise ValueError(
                    f"expected a GPU for memory_snapshot, got {world.device.type}; leave it out, "
                    "or see `python -m solution.memory_analysis`, which predicts"
                )
            require_free(folder, "rank*_snapshot.pickle")
        recording = Recording(folder, world.rank, config.profile_steps, world.device)
        recording.require(config.steps)
        return recording

    def _check_data(self) -> None:
        """Refuse too little data, and ids that the embedding lacks, in what will be read."""
        config, loader = self.config, self.loader
        possible = loader.num_batches // self.num_micro_batches
        if possible < config.steps:
            raise DataExhaustedError(
                f"expected data for {config.steps} steps of {config.global_batch_size} sequences, "
                f"got {loader.num_sequences} sequences of {self.sequence_length} tokens, enough "
                f"for {possible} steps; ask for fewer, or prepare more data"
            )
        self._check_vocabulary(loader, config.steps * config.global_batch_size)
        if self.val_loader is not None:
            loader = self.val_loader
            if not len(loader):
                raise ValueError(
                    f"{config.data}: expected a validation batch of {loader.global_batch_size} "
                    f"sequences, got {loader.num_sequences} of {self.sequence_length} tokens; "
                    "prepare with a larger --val-fraction, or train without --eval-every"
                )
            self._check_vocabulary(loader, config.eval_batches * loader.global_batch_size)

    def _check_vocabulary(self, loader: TokenLoader, num_sequences: int) -> None:
        unread = num_sequences * self.sequence_length
        for shard in loader.shards:
            if unread > 0:
                shard.check_vocabulary(self.model_config.vocab_size)
            unread -= len(shard)

    def announcement(self) -> str:
        """Return every derived number, in a few lines."""
        config, loader, num_ranks = self.config, self.loader, self.world.size
        sizes = f"{self.num_micro_batches} micro-batches x {config.micro_batch_size} x {num_ranks}"
        lines = [
            f"{self.name}: {config.model} {config.size}, {parameter_count(self.model_config):,} "
            f"parameters, vocabulary {self.model_config.vocab_size:,}, {config.precision}; "
            f"{num_ranks} rank(s) on {self.world.device.type}",
            f"  step: {config.global_batch_size} sequences = {sizes} rank(s) = "
            f"{config.global_batch_size * self.sequence_length:,} tokens; {config.steps} steps",
            f"  data: {len(loader.shards)} shards, {loader.num_sequences:,} sequences of "
            f"{self.sequence_length}, {len(loader) // self.num_micro_batches:,} steps per pass",
        ]
        if self.val_loader is not None:
            num_batches = min(config.eval_batches, len(self.val_loader))
            num_sequences = num_batches * self.val_loader.global_batch_size
            lines += [f"  evaluation: every {config.eval_every} steps, {num_sequences} sequences"]
        return "\n".join(lines)

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """AdamW; with `zero1` every rank keeps the state of a part of the parameters."""
        groups = decay_groups(module, weight_decay=self.config.weight_decay)
        if self.config.zero1:
            return ShardedOptimizer(groups, torch.optim.AdamW, lr=self.config.learning_rate)
        return torch.optim.AdamW(groups, lr=self.config.learning_rate)

    @contextmanager
    def running(self, finished: int) -> Iterator[RunLog]:
        """Open the log around all steps; `finished` of them were taken by an earlier process."""
        config = self.config
        self._counted = min(finished + COUNTED_STEP, config.steps - 1)
        self.recording.require(config.steps - finished)
        Path(config.out).mkdir(parents=True, exist_ok=True)
        self._summary_path.unlink(missing_ok=True)  # an earlier run's would be mistaken for ours
        snapshot = self.recording.path.with_name(f"rank{self.world.rank}_snapshot.pickle")
        path = Path(config.out) / f"{self.name}.jsonl" if self.world.is_first else None
        with (
            memory_history(snapshot if config.memory_snapshot else None),
            contextlib.closing(RunLog(path, config, finished=finished)) as log,
        ):
            yield log

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Time one optimizer step; profile it and count its traffic where that is due."""
        started = time.perf_counter()
        counting = self._traffic if step == self._counted else contextlib.nullcontext()
        with self.recording.step(step + 1), counting:
            yield
        self.seconds.append(time.perf_counter() - started)

    @property
    def _summary_path(self) -> Path:
        return Path(self.config.out) / f"{self.name}.rank{self.world.rank}.json"

    def evaluate(self, model: nn.Module, finished: int) -> float | None:
        """Return the validation loss if one is due after `finished` steps; all ranks call it."""
        config, loader = self.config, self.val_loader
        every = config.eval_every
        if loader is None or every is None or (finished % every and finished != config.steps):
            return None
        batches = itertools.islice(loader, config.eval_batches)
        self.val_loss = evaluate(model, batches, dtype=config.dtype)
        return self.val_loss

    def summarize(self, module: nn.Module, optimizer: torch.optim.Optimizer, log: RunLog) -> None:
        """Write this rank's summary; the first rank prints the main lines, too."""
        config, traffic, dtypes = self.config, self._traffic, (torch.float32, torch.bfloat16)
        parameters = list(module.parameters())
        # All ranks' tokens over this rank's median step: watched ones, and the first, are slower.
        tokens = config.global_batch_size * self.sequence_length
        summary: dict[str, Any] = {
            "name": self.name,
            "rank": self.world.rank,
            "world_size": self.world.size,
            "device": str(self.world.device),
            "steps": config.steps,
            "val_loss": self.val_loss,
            "tokens_per_s": tokens / statistics.median(self.seconds),
            # Control messages, the trainer's own, are float64.
            "reductions_per_step": traffic.count(*dtypes),
            "bytes_per_step": traffic.num_bytes(*dtypes),
            "collectives": traffic.by_kind(*dtypes),
            "control_messages_per_step": traffic.count() - traffic.count(*dtypes),
            "peak_memory_bytes": peak_memory_bytes(self.world.device),
            "parameter_bytes": sum(p.nbytes for p in parameters),
            "held_bytes": {
                "parameters": _local_bytes(parameters),
                "optimizer": _local_bytes(optimizer_tensors(optimizer)),
            },
            "weights_sha256": fingerprint(module),
            "config": dataclasses.asdict(config),
        }
        write_atomically(self._summary_path, json.dumps(summary, indent=2).encode() + b"\n")
        if self.world.is_first:
            val_loss = "" if self.val_loss is None else f", validation loss {self.val_loss:.6f}"
            trace = f", {self.recording.path}" if self.recording.is_written else ""
            say(
                f"  training completed, {significant(sum(self.seconds), 3)} s in steps; loss "
                f"{log.lines[0]['loss']:.6f} -> {log.lines[-1]['loss']:.6f}{val_loss}\n"
                f"  {significant(summary['tokens_per_s'], 3)} tokens/s (median step, all ranks), "
                f"peak memory {summary['peak_memory_bytes'] / 2**20:,.0f} MiB per rank\n"
                f"  sent per step: {listed(summary['collectives'])}; "
                f"{summary['bytes_per_step']:,} bytes\n"
                f"  {log.path}, {self._summary_path}{trace}"
            )


def _local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of what this rank has of each tensor."""
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


def fingerprint(module: nn.Module) -> str:
    """Return a hash over all parameters, names and bits: equal exactly when the weights are.

    All ranks call it: parameters of a sharded module are gathered.
    """
    digest = hashlib.sha256()
    for name, parameter in full_parameters(module).items():
        data = parameter.cpu().contiguous().flatten().view(torch.uint8)
        digest.update(name.encode() + data.numpy().tobytes())
    return digest.hexdigest()


Wrap = Callable[[nn.Module, TrainConfig, World], nn.Module]


def main(
    train: Callable[[Job, Wrap], None],
    wrap: Wrap,
    *,
    description: str,
    name: str | None = None,
    kind: type[TrainConfig] = TrainConfig,
) -> int:
    """Run the command of an entry script, and return the exit status.

    `train` carries a job out, `wrap` puts the model into what reduces its gradients, and the fields
    of the config `kind` are the flags. A `name` of None, for the files, is the config's.
    """
    world: World | None = None
    job: Job | None = None  # once no rank refuses its own
    try:
        config, is_dry_run = kind.from_command_line(description)
        with distributed(device=None if config.device == "auto" else config.device) as world:
            job = _on_all_ranks(config, world, name or config.name)
            if world.is_first:
                say(job.announcement())
            if not is_dry_run:
                train(job, wrap)
            return DONE
    except REPORTED as error:
        status = STATUS.get(type(error))
        if status is None and job is not None:  # the request was right: a bug, and needs its stack
            raise
        if job is not None or world is None or world.is_first:  # which knows of every refusal
            where = f"[rank {world.rank}] " if world is not None and world.size > 1 else ""
            said = "" if status == INTERRUPTED else "error: "
            sys.stderr.write(f"{where}{said}{error}\n")
        return BAD_INPUT if status is None else status


def _on_all_ranks(config: TrainConfig, world: World, name: str) -> Job:
    """Return this rank's job; raise on all ranks if one of them refuses it."""
    made: list[Job] = []

    def prepare() -> list[str]:
        made.append(Job(config, world, name=name))
        return []

    on_all_ranks(prepare, [None], expected="a job that no rank refuses")
    return made[0]
