"""One training job, from flags to table: what all `train_*` scripts share.

1. Flags (and a TOML file, `--config`) become a `TrainConfig`; unknown keys are errors.
2. `solution.plan` refuses what can be refused before the first step, in one line, and derives every
   number. `--dry-run` ends there.
3. Every rank seeds alike, builds the same model and wraps it; rank r reads its part of the data.
4. Rank 0 prints `step | loss | lr | time | tokens/s | grad norm` and keeps the log
   (`solution.runlog`). The traffic of one step is counted, and that step is left out of the timing,
   as evaluations are.
5. Every rank writes OUT/NAME.rankR.json: throughput, reductions and bytes, peak memory, fingerprint
   of the final weights. Rank 0 ends with a table.
6. With `--profile-steps` it records some steps (`solution.measure.recording`): one file per rank,
   TRACES/SETUP/rankN_trace.json, for `python -m solution.analyze_traces`.
7. With `--checkpoint-dir` it saves, goes on where it stopped, and stops when it is told to
   (`solution.resume`).

Exit status: 0 done, 1 failed, 2 bad input, 3 out of data, 4 told to stop, and saved. (torchrun
itself reports any of them as 1, and says which in its last lines.)
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from solution.checkpoint import CheckpointError
from solution.config import parse
from solution.data.shards import write_atomically
from solution.evaluate import evaluate
from solution.measure.fingerprint import fingerprint
from solution.measure.holdings import Holdings, watched
from solution.measure.memory import peak_memory_bytes
from solution.measure.recording import WARM_UP, ShortRunError, memory_history
from solution.measure.traffic import Traffic
from solution.models import families
from solution.optim import cosine_schedule
from solution.plan import Plan
from solution.precision import Precision
from solution.resume import Interrupted, Restarts
from solution.runlog import RunLog, say, table
from solution.train_config import TrainConfig
from solution.trainer import DataExhaustedError, NonFiniteError, StepRecord, training_steps
from solution.world import World, distributed

__all__ = ["Wrap", "main"]

Wrap = Callable[[nn.Module, TrainConfig, World], nn.Module]
COUNTED_STEP = 2  # the third: PyTorch's DDP settles its buckets after the first
DONE, FAILED, BAD_INPUT, OUT_OF_DATA, INTERRUPTED = range(5)


def main(
    wrap: Wrap,
    *,
    name: str | None,
    description: str,
    kind: type[TrainConfig] = TrainConfig,
    arguments: Sequence[str] | None = None,
) -> int:
    """The command of an entry script.

    Args:
        wrap: puts the model into what reduces its gradients.
        name: of the files written; None takes the config's.
        description: for `--help`.
        kind: of the config; its fields are the flags.
        arguments: instead of the command line's.

    Returns:
        The exit status.
    """
    flags = _parser(description, kind).parse_args(arguments)
    where, plan = "", None
    try:
        config = _config(flags, kind)
        with distributed(device=None if config.device == "auto" else config.device) as world:
            where = f"[rank {world.rank}] " if world.size > 1 else ""
            plan = Plan.of(config, world, name=name or config.name)
            if world.is_first:
                say(plan.announcement())
            if not flags.dry_run:
                _Run(plan).run(wrap)
            return DONE
    except DataExhaustedError as error:
        _complain(where, error)
        return OUT_OF_DATA
    except Interrupted as error:
        sys.stderr.write(f"{where}{error}\n")
        return INTERRUPTED
    except (NonFiniteError, CheckpointError, ShortRunError) as error:
        _complain(where, error)
        return FAILED
    except (ValueError, OSError) as error:
        if plan is not None:  # not what was asked for is wrong: whoever repairs it needs the stack
            raise
        _complain(where, error)
        return BAD_INPUT


def _parser(description: str, kind: type[TrainConfig]) -> argparse.ArgumentParser:
    """One flag per field of the config, with its help and default."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    for field in dataclasses.fields(kind):
        flag = "--" + field.name.replace("_", "-")
        text = f"{field.metadata['help']} (default: {field.default})"
        action: Any = argparse.BooleanOptionalAction if isinstance(field.default, bool) else "store"
        parser.add_argument(flag, action=action, default=argparse.SUPPRESS, help=text)
    parser.add_argument("--config", type=Path, help="TOML file of these settings; flags win")
    parser.add_argument("--dry-run", action="store_true", help="check, say the numbers, and stop")
    return parser


def _config(flags: argparse.Namespace, kind: type[TrainConfig]) -> TrainConfig:
    settings = {k: v for k, v in vars(flags).items() if k not in ("config", "dry_run")}
    if flags.config is not None:
        try:
            settings = tomllib.loads(flags.config.read_text()) | settings
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{flags.config}: expected TOML, got {error}") from None
    return parse(kind, settings)


class _Run:
    """What carries a plan out."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.config, self.world, self.out = plan.config, plan.world, Path(plan.config.out)
        self.precision = Precision(plan.config.precision)
        self.log: RunLog | None = None  # of the first rank
        self.last: StepRecord | None = None
        self.val_loss: float | None = None

    def run(self, wrap: Wrap) -> None:
        """Train, log, and write this rank's summary."""
        config, plan = self.config, self.plan
        torch.manual_seed(config.seed)
        module = families.build(
            plan.model_config,
            attention=config.attention,
            activation_checkpointing=config.activation_checkpointing,
        ).to(self.world.device)
        model = wrap(module, config, self.world)  # first: it may put shards in place of parameters
        optimizer = plan.optimizer(module)
        self.out.mkdir(parents=True, exist_ok=True)
        path = self.out / f"{plan.name}.rank{self.world.rank}.json"
        traffic, holdings = Traffic(), Holdings(model, optimizer)
        with Restarts(
            config, self.world, model, optimizer, plan.loader, self.precision
        ) as restarts:
            finished = restarts.resume()
            if finished >= config.steps:
                return  # done by an earlier run, whose summary stands
            path.unlink(missing_ok=True)  # an earlier run's must not vouch for this one
            steps = training_steps(
                model,
                optimizer,
                plan.loader,
                steps=config.steps - finished,
                first_step=finished,
                global_batch_size=config.global_batch_size,
                micro_batch_size=config.micro_batch_size,
                max_norm=config.max_norm,
                lr=cosine_schedule(
                    config.learning_rate, num_steps=config.steps, warmup_steps=config.warmup_steps
                ),
                precision=self.precision,
            )
            plan.recording.require(config.steps - finished)
            with memory_history(plan.snapshot):
                times = self._take_steps(model, steps, restarts, finished, traffic, holdings)
        summary = self._summary(module, times, traffic) | {"held_bytes": holdings.num_bytes}
        write_atomically(path, json.dumps(summary, indent=2).encode() + b"\n")
        if self.log is not None:
            say(self._table(self.log, summary, path))

    def _take_steps(
        self,
        model: nn.Module,
        steps: Iterator[StepRecord],
        restarts: Restarts,
        finished: int,
        *instruments: AbstractContextManager[Any],
    ) -> list[float]:
        """Run all steps; the first rank logs them. Returns the seconds of the typical ones."""
        config = self.config
        counted = min(finished + COUNTED_STEP, config.steps - 1)
        times = []
        with contextlib.ExitStack() as stack:
            if self.world.is_first:
                self.log = stack.enter_context(
                    RunLog(
                        self.out,
                        self.plan.name,
                        steps=config.steps,
                        finished=finished,
                        log_every=config.log_every,
                        tensorboard=config.tensorboard,
                    )
                )
            for index in range(finished, config.steps):
                started = time.perf_counter()
                with (
                    self.plan.recording.step(index + 1),
                    watched(*instruments) if index == counted else contextlib.nullcontext(),
                ):
                    self.last = next(steps)
                times.append(time.perf_counter() - started)
                val_loss = self._evaluate(model, finished=index + 1)
                if self.log is not None:
                    self.log.step(self.last, seconds=times[-1], val_loss=val_loss)
                restarts.after_step(index + 1)
        # The first step warms up; counted and recorded ones are slowed down by being watched.
        recorded = range(WARM_UP, WARM_UP + config.profile_steps)
        untypical = (0, counted - finished, *recorded)
        return [s for index, s in enumerate(times) if index not in untypical] or times

    def _evaluate(self, model: nn.Module, *, finished: int) -> float | None:
        """The validation loss, where one is due; every rank takes part."""
        every, loader = self.config.eval_every, self.plan.val_loader
        if loader is None or every is None or (finished % every and finished != self.config.steps):
            return None
        self.val_loss = evaluate(
            model, loader, max_batches=self.config.eval_batches, precision=self.precision
        )
        return self.val_loss

    def _summary(self, module: nn.Module, times: list[float], traffic: Traffic) -> dict[str, Any]:
        """What this rank has to say; throughput is over all ranks, of the median step."""
        tokens = self.config.global_batch_size * self.plan.sequence_length
        dtype = next(module.parameters()).dtype  # the trainer's own counts are float64
        assert self.last is not None  # a plan has at least one step
        return {
            "name": self.plan.name,
            "rank": self.world.rank,
            "world_size": self.world.size,
            "device": str(self.world.device),
            "steps": self.last["step"],
            "loss": self.last["loss"],
            "val_loss": self.val_loss,
            "tokens_per_s": tokens / statistics.median(times),
            "reductions_per_step": traffic.count(dtype),
            "bytes_per_step": traffic.num_bytes(dtype),
            "collectives": traffic.by_kind(dtype),
            "control_messages_per_step": traffic.count() - traffic.count(dtype),
            "control_bytes_per_step": traffic.num_bytes() - traffic.num_bytes(dtype),
            "peak_memory_bytes": peak_memory_bytes(self.world.device),
            "parameter_bytes": sum(p.numel() * p.element_size() for p in module.parameters()),
            "weights_sha256": fingerprint(module),
            "config": dataclasses.asdict(self.config),
        }

    def _table(self, log: RunLog, summary: dict[str, Any], path: Path) -> str:
        """What the run came to, with the files that hold the rest."""
        lines, rate = log.lines, summary["tokens_per_s"]
        flops = families.flops_per_token(
            self.plan.model_config, sequence_length=self.plan.sequence_length
        )
        plot = log.plot()
        rows = [
            ("steps", f"{summary['steps']}, {sum(line['tokens'] for line in lines):,} tokens"),
            ("loss", f"{lines[0]['loss']:.6f} -> {lines[-1]['loss']:.6f}"),
            ("validation loss", "-" if self.val_loss is None else f"{self.val_loss:.6f}"),
            (
                "tokens/s",
                f"{rate:,.0f} (median step, all ranks), {rate * flops / 1e9:,.1f} GFLOP/s",
            ),
            (
                "traffic",
                f"{summary['reductions_per_step']} collectives, "
                f"{summary['bytes_per_step']:,} bytes per step",
            ),
            ("peak memory", f"{summary['peak_memory_bytes'] / 2**20:,.0f} MiB per rank"),
            ("log", str(log.path)),
            ("summary", str(path)),
            ("plots", "- (matplotlib is not installed)" if plot is None else str(plot)),
        ]
        if self.plan.recording.is_written:
            rows.append(("trace", str(self.plan.recording.path)))
        if self.precision.name == "fp16":
            skipped = sum(line["skipped"] for line in lines)
            rows.insert(3, ("overflows", f"{skipped}, loss scale {self.precision.scale:g}"))
        return table(rows)


def _complain(where: str, error: Exception) -> None:
    sys.stderr.write(f"{where}error: {error}\n")
