"""One training job, from flags to table: what all `train_*` scripts share.

1. Flags (and a TOML file, `--config`) become a `TrainConfig`; unknown keys are errors.
2. `Job` derives every number, and refuses what can be refused before the first step, in one line:
   sizes that do not divide, files that are no shards, ids beyond the vocabulary, too little data.
   `--dry-run` ends there.
3. `solution.train_baseline.train` builds the same model on every rank, wraps it and trains.
4. Rank 0 keeps the log (`solution.runlog`). The traffic of one step is counted, and that step is
   left out of the timing, as evaluations are.
5. Every rank writes OUT/NAME.rankR.json: throughput, reductions and bytes, peak memory, fingerprint
   of the final weights. Rank 0 ends with a table.
6. With `--profile-steps` it records some steps (`solution.measure.recording`): one file per rank,
   TRACES/SETUP/rankN_trace.json, for `python -m solution.analyze_traces`.
7. With `--checkpoint-dir` it saves, resumes, and stops on SIGTERM (`solution.resume`).

Exit status: 0 done, 1 failed, 2 bad input, 3 out of data, 4 told to stop, and saved. (torchrun
itself reports any of them as 1, and says which in its last lines.)
"""

import contextlib
import dataclasses
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from solution import comm
from solution.attention import unavailable
from solution.checkpoint import CheckpointError
from solution.console import significant
from solution.data.loader import TokenLoader, token_loader
from solution.data.prepare import read_meta
from solution.data.shards import find_shards, write_atomically
from solution.evaluate import evaluate
from solution.measure.memory import Holdings, memory_history, peak_memory_bytes
from solution.measure.recording import WARM_UP, Recording, ShortRunError, require_free
from solution.measure.trace import listed
from solution.measure.traffic import Traffic
from solution.models import families
from solution.optim import cosine_schedule, decay_groups
from solution.parallel.fsdp.api import full_parameters
from solution.parallel.zero1 import ShardedOptimizer
from solution.precision import Precision
from solution.runlog import RunLog, say
from solution.train_config import TrainConfig
from solution.trainer import DataExhaustedError, NonFiniteError, StepRecord, accumulation_steps
from solution.world import World, distributed

COUNTED_STEP = 2  # the third: PyTorch's DDP settles its buckets after the first
GPT2_VOCABULARY = 50257  # of shards that come without a tokenizer's word
DONE, FAILED, BAD_INPUT, OUT_OF_DATA, INTERRUPTED = range(5)


class Interrupted(RuntimeError):
    """The run was told to stop, and has saved what it had."""


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
        self.recording = self._recording()
        self.learning_rate = cosine_schedule(
            config.learning_rate, num_steps=config.steps, warmup_steps=config.warmup_steps
        )
        self.precision = Precision(config.precision)
        self.times: list[float] = []  # seconds of each step that this process took
        self._traffic = Traffic()
        self._val_loss: float | None = None
        self._check_data()

    # --- before the first step

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
        config, loader = self.config, self.loader
        tokens = config.global_batch_size * self.sequence_length
        flops = families.flops_per_token(self.model_config, sequence_length=self.sequence_length)
        text = (
            f"{self.name}: {config.model} {config.size}, "
            f"{families.parameter_count(self.model_config):,} parameters, vocabulary "
            f"{self.model_config.vocab_size:,}, {significant(flops / 1e6)} MFLOP/token, "
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

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """AdamW; with `zero1` every rank keeps the state of a part of the parameters."""
        groups = decay_groups(module, weight_decay=self.config.weight_decay)
        if self.config.zero1:
            return ShardedOptimizer(groups, torch.optim.AdamW, lr=self.config.learning_rate)
        return torch.optim.AdamW(groups, lr=self.config.learning_rate)

    # --- while it runs

    @contextmanager
    def running(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, finished: int
    ) -> Iterator[RunLog]:
        """Open the log around all steps; `finished` of them were taken by an earlier process."""
        config = self.config
        self._counted = min(finished + COUNTED_STEP, config.steps - 1)
        self._first_step, self._holdings = finished, Holdings(model, optimizer)
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
        with contextlib.ExitStack() as instruments:
            instruments.enter_context(self.recording.step(step + 1))
            for each in (self._traffic, self._holdings) if step == self._counted else ():
                instruments.enter_context(each)
            yield
        self.times.append(time.perf_counter() - started)

    @property
    def _summary_path(self) -> Path:
        return Path(self.config.out) / f"{self.name}.rank{self.world.rank}.json"

    def evaluate(self, model: nn.Module, finished: int) -> float | None:
        """Return the validation loss if one is due after `finished` steps; all ranks call it."""
        every, loader = self.config.eval_every, self.val_loader
        if loader is None or every is None or (finished % every and finished != self.config.steps):
            return None
        self._val_loss = evaluate(
            model, loader, max_batches=self.config.eval_batches, precision=self.precision
        )
        return self._val_loss

    # --- at its end

    def summarize(self, module: nn.Module, last: StepRecord, log: RunLog) -> None:
        """Write this rank's summary; the first rank prints the table, too."""
        summary = self._summary(module, last)
        write_atomically(self._summary_path, json.dumps(summary, indent=2).encode() + b"\n")
        if self.world.is_first:
            say(self._table(log, summary))

    def _summary(self, module: nn.Module, last: StepRecord) -> dict[str, Any]:
        """Return this rank's numbers; throughput is of the median step, over all ranks."""
        # The first step warms up; counted and recorded ones are slowed down by being watched.
        recorded = range(WARM_UP, WARM_UP + self.config.profile_steps)
        untypical = (0, self._counted - self._first_step, *recorded)
        times = [s for index, s in enumerate(self.times) if index not in untypical] or self.times
        tokens = self.config.global_batch_size * self.sequence_length
        traffic, dtypes = self._traffic, (torch.float32, torch.bfloat16)  # its own are float64
        return {
            "name": self.name,
            "rank": self.world.rank,
            "world_size": self.world.size,
            "device": str(self.world.device),
            "steps": last["step"],
            "loss": last["loss"],
            "val_loss": self._val_loss,
            "tokens_per_s": tokens / statistics.median(times),
            "reductions_per_step": traffic.count(*dtypes),
            "bytes_per_step": traffic.num_bytes(*dtypes),
            "collectives": traffic.by_kind(*dtypes),
            "control_messages_per_step": traffic.count() - traffic.count(*dtypes),
            "control_bytes_per_step": traffic.num_bytes() - traffic.num_bytes(*dtypes),
            "peak_memory_bytes": peak_memory_bytes(self.world.device),
            "parameter_bytes": sum(p.numel() * p.element_size() for p in module.parameters()),
            "weights_sha256": fingerprint(module),
            "config": dataclasses.asdict(self.config),
            "held_bytes": self._holdings.num_bytes,
        }

    def _table(self, log: RunLog, summary: dict[str, Any]) -> str:
        """Return what the run came to, with the files that hold the rest."""
        lines, rate = log.lines, summary["tokens_per_s"]
        flops = families.flops_per_token(self.model_config, sequence_length=self.sequence_length)
        rows: dict[str, object] = {
            "training": f"completed, {significant(sum(self.times), 3)} s in steps",
            "steps": f"{summary['steps']}, {sum(line['tokens'] for line in lines):,} tokens",
            "loss": f"{lines[0]['loss']:.6f} -> {lines[-1]['loss']:.6f}",
            "validation loss": "-" if self._val_loss is None else f"{self._val_loss:.6f}",
        }
        if self.precision.name == "fp16":
            skipped = sum(line["skipped"] for line in lines)
            rows["overflows"] = f"{skipped}, loss scale {self.precision.scale:g}"
        rows |= {
            "tokens/s": f"{significant(rate, 3)} (median step, all ranks), "
            f"{significant(rate * flops / 1e9)} GFLOP/s",
            "traffic": f"{listed(summary['collectives'])}; {summary['bytes_per_step']:,} bytes per "
            "step",
            "peak memory": f"{summary['peak_memory_bytes'] / 2**20:,.0f} MiB per rank",
            "log": log.path,
            "summary": self._summary_path,
            "plots": log.plot() or "- (matplotlib is not installed)",
        }
        if self.recording.is_written:
            rows["trace"] = self.recording.path
        width = max(map(len, rows))
        return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows.items())


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


REFUSALS = (ValueError, OSError, DataExhaustedError, ShortRunError)


def _job_on_all_ranks(config: TrainConfig, world: World, name: str) -> tuple[Job | Exception, bool]:
    """Return this rank's job, or why it is refused, and whether an earlier rank says so.

    Where one rank refuses, all do: the others would wait for it.
    """
    found: Job | Exception
    try:
        found, reason = Job(config, world, name=name), None
    except REFUSALS as error:
        found, reason = error, str(error)
    reasons = comm.gather_objects(reason)
    if reason is None and any(reasons):
        return ValueError("another rank refuses to start, and says why"), True
    return found, reason is not None and reason in reasons[: world.rank]


def _complain(where: str | None, text: str) -> None:
    """Write to stderr, unless another rank has said it (None)."""
    if where is not None:
        sys.stderr.write(f"{where}{text}\n")


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
    where: str | None = ""
    job = None
    try:
        config, is_dry_run = kind.from_command_line(description)
        with distributed(device=None if config.device == "auto" else config.device) as world:
            where = f"[rank {world.rank}] " if world.size > 1 else ""
            found, is_said = _job_on_all_ranks(config, world, name or config.name)
            if isinstance(found, Exception):
                where = None if is_said else where
                raise found
            job = found
            if world.is_first:
                say(job.announcement())
            if not is_dry_run:
                train(job, wrap)
            return DONE
    except Interrupted as error:
        _complain(where, f"{error}")
        return INTERRUPTED
    except (DataExhaustedError, NonFiniteError, CheckpointError, ShortRunError) as error:
        _complain(where, f"error: {error}")
        if isinstance(error, DataExhaustedError):
            return OUT_OF_DATA
        return BAD_INPUT if job is None and isinstance(error, ShortRunError) else FAILED
    except (ValueError, OSError) as error:
        if job is not None:  # the request was right: this is a bug, and needs its stack
            raise
        _complain(where, f"error: {error}")
        return BAD_INPUT
