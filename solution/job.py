"""One training job, from flags to summary: what all `train_*` scripts share.

1. Flags become a `TrainConfig`; unknown ones are errors.
2. `Job` derives every number, and refuses what can be refused before the first step, in one line:
   sizes that do not divide, files that are no shards, ids beyond the vocabulary, too little data.
   `--dry-run` ends there.
3. `train` builds the same model on every rank, wraps it, resumes (`solution.resume`) and loops.
   Rank 0 keeps the log (`solution.runlog`). The traffic of one step is counted.
4. Every rank writes OUT/NAME.rankR.json: throughput, messages and bytes of a step, memory, and a
   fingerprint of the final weights. Rank 0 prints the main ones.
5. With `--profile-steps` it records some steps (`solution.measure.recording`): one file per rank,
   TRACES/NAME/rankN_trace.json, for `python -m solution.analyze_traces`.

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

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from solution import trainer
from solution.attention import unavailable
from solution.checkpoint import CheckpointError, latest_step
from solution.console import say, significant
from solution.data.loader import TokenLoader, token_loader
from solution.data.prepare import vocabulary_of
from solution.data.shards import find_shards, write_atomically
from solution.measure.memory import memory_history, optimizer_tensors, peak_memory_bytes
from solution.measure.recording import Recording, require_free
from solution.measure.trace import listed
from solution.measure.traffic import Traffic
from solution.models import families
from solution.optim import cosine_schedule, decay_groups
from solution.parallel.agreement import on_all_ranks
from solution.parallel.fsdp.api import full_parameters
from solution.parallel.zero1 import ShardedOptimizer
from solution.resume import Interrupted, Restarts
from solution.runlog import RunLog
from solution.train_config import TrainConfig
from solution.world import World, distributed

COUNTED_STEP = 2  # the third: PyTorch's DDP settles its buckets after the first
GPT2_VOCABULARY = 50257  # of shards that come without a tokenizer's word
DONE, BAD_INPUT = 0, 2
STATUS: dict[type[Exception], int] = {
    trainer.NonFiniteError: 1,
    CheckpointError: 1,
    trainer.DataExhaustedError: 3,
    Interrupted: 4,
}
REPORTED: tuple[type[Exception], ...] = (*STATUS, ValueError, OSError)
Wrap = Callable[[nn.Module, TrainConfig, World], nn.Module]


def train(job: "Job", wrap: Wrap) -> None:
    """Build, wrap, loop, log; every rank calls it."""
    config, world = job.config, job.world
    torch.manual_seed(config.seed)  # equal on all ranks, so they build the same model
    module = families.build(
        job.model_config,
        attention=config.attention,
        activation_checkpointing=config.activation_checkpointing,
    ).to(world.device)
    model = wrap(module, config, world)  # first: it may put shards in place of parameters
    optimizer = job.optimizer(module)
    with Restarts(config, world, model, optimizer, job.loader) as restarts:
        finished = restarts.resume()
        if finished >= config.steps:
            return  # done by an earlier run, whose summary stays
        records = trainer.training_steps(
            model,
            optimizer,
            job.loader,
            steps=config.steps,
            finished=finished,
            global_batch_size=config.global_batch_size,
            micro_batch_size=config.micro_batch_size,
            max_norm=config.max_norm,
            lr=job.learning_rate,
            dtype=config.dtype,
        )
        log = job.begin(finished)
        with memory_history(job.snapshot):
            for step in range(finished, config.steps):
                with job.watching(step):
                    record = next(records)
                log.step(record, seconds=job.seconds[-1], val_loss=job.evaluate(model, step + 1))
                restarts.after_step(step + 1)
    job.summarize(module, optimizer, log)


class Job:
    """One run on one rank: what follows from its config, its data and its place in the world.

    Raises:
        ValueError: data, sizes or vocabulary that do not fit each other, attention that cannot run
            here, or, in a run that begins, too few steps or an occupied folder for a recording.
        DataExhaustedError: less data than is needed.
    """

    def __init__(self, config: TrainConfig, world: World) -> None:
        self.config, self.world, self.name = config, world, config.name
        if reason := unavailable(config.attention, world.device.type):
            raise ValueError(f"expected an attention that runs on {world.device.type}: {reason}")
        self.num_micro_batches = trainer.accumulation_steps(  # of a step, on each rank
            global_batch_size=config.global_batch_size,
            micro_batch_size=config.micro_batch_size,
            world_size=world.size,
        )
        vocabulary = config.vocab_size or vocabulary_of(Path(config.data)) or GPT2_VOCABULARY
        self.model_config = config.model_config(vocab_size=vocabulary)
        self.sequence_length = config.sequence_length or self.model_config.max_sequence_length
        self.loader = self._loader("train", config.steps * self.num_micro_batches)
        possible = self.loader.num_batches // self.num_micro_batches
        if possible < config.steps:
            raise trainer.DataExhaustedError(
                f"expected data for {config.steps} steps of {config.global_batch_size} sequences, "
                f"got {self.loader.num_sequences} sequences of {self.sequence_length} tokens, "
                f"enough for {possible} steps; ask for fewer, or prepare more data"
            )
        self.val_loader = None
        if config.eval_every is not None:
            self.val_loader = self._loader("val", config.eval_batches)
            if not len(self.val_loader):
                raise ValueError(
                    f"{config.data}: expected a validation batch of "
                    f"{self.val_loader.global_batch_size} sequences of {self.sequence_length} "
                    f"tokens, got {self.val_loader.num_sequences} sequences; prepare with a larger "
                    "--val-fraction, or train without --eval-every"
                )
        self.learning_rate = cosine_schedule(
            config.learning_rate, num_steps=config.steps, warmup_steps=config.warmup_steps
        )
        folder = Path(config.traces) / self.name
        self.snapshot: Path | None = None
        if config.memory_snapshot:
            if world.device.type != "cuda":
                raise ValueError(
                    f"expected a GPU for memory_snapshot, got {world.device.type}; leave it out, "
                    "or see `python -m solution.memory_analysis`, which predicts"
                )
            self.snapshot = folder / f"rank{world.rank}_snapshot.pickle"
        self.recording = Recording(folder, world.rank, config.profile_steps, world.device)
        if config.checkpoint_dir is None or latest_step(config.checkpoint_dir) is None:
            self._require_recording(config.steps)  # of a run that goes on: in `begin`
        self.seconds: list[float] = []  # of each step that this process took
        self.val_loss: float | None = None  # the newest
        self._traffic = Traffic()
        self._summary_path = Path(config.out) / f"{self.name}.rank{world.rank}.json"

    def _loader(self, split: str, num_batches: int) -> TokenLoader:
        """Return the loader of a split; refuse ids beyond the vocabulary in what will be read."""
        loader = token_loader(
            find_shards(self.config.data, split),
            batch_size=self.config.micro_batch_size,
            sequence_length=self.sequence_length,
            rank=self.world.rank,
            world_size=self.world.size,
        )
        unread = num_batches * loader.global_batch_size  # sequences
        for shard in loader.shards:
            if unread > 0:
                shard.check_vocabulary(self.model_config.vocab_size)
            unread -= max(0, len(shard) - 1) // self.sequence_length
        return loader

    def __str__(self) -> str:
        config, loader, num_ranks = self.config, self.loader, self.world.size
        evaluation = ""
        if self.val_loader is not None:
            num_batches = min(config.eval_batches, len(self.val_loader))
            num_sequences = num_batches * self.val_loader.global_batch_size
            evaluation = (
                f"\n  evaluation: every {config.eval_every} steps, {num_sequences} sequences"
            )
        return (
            f"{self.name}: {config.model} {config.size}, "
            f"{families.parameter_count(self.model_config):,} parameters, vocabulary "
            f"{self.model_config.vocab_size:,}, {config.precision}, on {self.world.device.type}\n"
            f"  {config.steps} steps of {self.num_micro_batches} micro-batches x "
            f"{config.micro_batch_size} x {num_ranks} rank(s) = {config.global_batch_size} "
            f"sequences = {config.global_batch_size * self.sequence_length:,} tokens\n"
            f"  data: {len(loader.shards)} shards, {loader.num_sequences:,} sequences of "
            f"{self.sequence_length}, {len(loader) // self.num_micro_batches:,} steps per pass"
            f"{evaluation}"
        )

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """AdamW; with `zero1` every rank keeps the state of a part of the parameters."""
        groups = decay_groups(module, weight_decay=self.config.weight_decay)
        if self.config.zero1:
            return ShardedOptimizer(groups, torch.optim.AdamW, lr=self.config.learning_rate)
        return torch.optim.AdamW(groups, lr=self.config.learning_rate)

    def _require_recording(self, num_left: int) -> None:
        """Raise a ValueError unless what is asked for can be recorded in so many steps."""
        self.recording.require(num_left)
        if self.snapshot is not None:
            require_free(self.snapshot.parent, "rank*_snapshot.pickle")

    def begin(self, finished: int) -> RunLog:
        """Return the log of the steps to come; `finished` were taken by an earlier process.

        A run that goes on, and cannot record what is asked for any more, records nothing.
        """
        config = self.config
        try:
            self._require_recording(config.steps - finished)
        except ValueError as error:
            self.recording.num_steps, self.snapshot = 0, None
            if self.world.is_first:
                say(f"  going on without a recording: {error}")
        self._counted = min(finished + COUNTED_STEP, config.steps - 1)
        Path(config.out).mkdir(parents=True, exist_ok=True)
        self._summary_path.unlink(missing_ok=True)  # an earlier run's would be mistaken for ours
        path = Path(config.out) / f"{self.name}.jsonl" if self.world.is_first else None
        return RunLog(path, config, finished=finished)

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Time one optimizer step; profile it and count its traffic where that is due."""
        started = time.perf_counter()
        counting = self._traffic if step == self._counted else contextlib.nullcontext()
        with self.recording.step(step + 1), counting:
            yield
        self.seconds.append(time.perf_counter() - started)

    def evaluate(self, model: nn.Module, finished: int) -> float | None:
        """Return the validation loss if one is due after `finished` steps; all ranks call it."""
        config, loader = self.config, self.val_loader
        every = config.eval_every
        if loader is None or every is None or (finished % every and finished != config.steps):
            return None
        batches = itertools.islice(loader, config.eval_batches)
        self.val_loss = trainer.evaluate(model, batches, dtype=config.dtype)
        return self.val_loss

    def summarize(self, module: nn.Module, optimizer: torch.optim.Optimizer, log: RunLog) -> None:
        """Write this rank's summary; the first rank prints the main lines, too."""
        config = self.config
        dtypes = (torch.float32, torch.bfloat16)  # control messages, the trainer's own, are float64
        parameters = list(module.parameters())
        # All ranks' tokens over this rank's median step: watched ones, and the first, are slower.
        tokens = config.global_batch_size * self.sequence_length
        collectives = self._traffic.by_kind(*dtypes)
        num_messages = sum(one.dtype in dtypes for one in self._traffic.collectives)
        summary = {
            "rank": self.world.rank,
            "device": str(self.world.device),
            "steps": config.steps,
            "val_loss": self.val_loss,
            "tokens_per_s": tokens / statistics.median(self.seconds),
            "messages_per_step": num_messages,
            "control_messages_per_step": len(self._traffic.collectives) - num_messages,
            "bytes_per_step": sum(one["bytes"] for one in collectives.values()),
            "collectives": collectives,
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
            say(
                f"  training completed, {significant(sum(self.seconds), 3)} s in steps; loss "
                f"{log.lines[0]['loss']:.6f} -> {log.lines[-1]['loss']:.6f}{val_loss}\n"
                f"  {significant(summary['tokens_per_s'], 3)} tokens/s (median step, all ranks), "
                f"peak memory {summary['peak_memory_bytes'] / 2**20:,.0f} MiB per rank\n"
                f"  sent per step: {listed(collectives)}; "
                f"{summary['bytes_per_step']:,} bytes\n"
                f"  {log.path}, {self._summary_path}"
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


def main(wrap: Wrap, kind: type[TrainConfig], description: str) -> int:
    """Run the command of an entry script, and return the exit status.

    `wrap` puts the model into what reduces its gradients, and the fields of the config `kind` are
    the flags.
    """
    world: World | None = None
    made: list[Job] = []
    is_accepted = False  # once no rank refuses its job
    try:
        config, is_dry_run = kind.from_command_line(description)
        with distributed(device=None if config.device == "auto" else config.device) as world:

            def prepare() -> list[str]:
                made.append(Job(config, world))
                return []

            on_all_ranks(prepare, [None], expected="a job that no rank refuses")
            is_accepted = True
            if world.is_first:
                say(str(made[0]))
            if not is_dry_run:
                train(made[0], wrap)
            return DONE
    except REPORTED as error:
        status = STATUS.get(type(error))
        if status is None and is_accepted:  # the request was right: a bug, and needs its stack
            raise
        if is_accepted or world is None or world.is_first:  # which knows of every refusal
            where = f"[rank {world.rank}] " if world is not None and world.size > 1 else ""
            said = "" if isinstance(error, Interrupted) else "error: "
            sys.stderr.write(f"{where}{said}{error}\n")
        return BAD_INPUT if status is None else status
