"""A toy language model, the data of a job, one rank's view of `train`, and the oracle.

A job is `steps` global batches of `global_batch` sequences. Micro-batch m of rank r holds the rows
[(m * W + r) * B, ... + B) of the step's batch, as a token loader would give them, so every way to
cut a step into ranks and micro-batches trains on the same sequences, and one process with the
whole batch is the oracle.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from spec_tests.programs.laws import refusal
from spec_tests.programs.ways import replicated
from spec_tests.rig import judge
from spec_tests.rig.judge.tolerance import Tolerance, rounding
from spec_tests.rig.ranks.rank import Context

VOCABULARY, LENGTH, WIDTH = 11, 5, 6
POISON = VOCABULARY - 1  # an id that occurs in no data but poisoned ones
IGNORED = -100
TRAIN = ("train",)
WRAPPERS = ("ddp", "ddp_bucketed")

Batch = tuple[torch.Tensor, torch.Tensor]


class ToyLanguageModel(nn.Module):
    """Embedding, tanh, Linear, in float32; the id POISON makes every logit of its place NaN.

    First in its row, it makes a target of 0 impossible: the loss is infinite, its gradient not.
    Last in its row, it makes the gradient NaN, and changes no logit.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [batch, seq, vocabulary]."""
        logits = self.head(torch.tanh(self.embedding(ids)))
        poisoned = ids == POISON
        is_nan = poisoned.all(dim=-1, keepdim=True)
        place = torch.arange(ids.shape[-1], device=ids.device)
        is_first = torch.arange(VOCABULARY, device=ids.device) == 0
        impossible = (poisoned & ~is_nan & (place == 0)).unsqueeze(-1) & is_first
        is_steep = (poisoned & ~is_nan & (place == len(place) - 1)).unsqueeze(-1)
        # The root of zero, whose slope is infinite, times zero.
        logits = logits + 0.0 * torch.where(is_steep, logits - logits.detach(), 1.0).abs().sqrt()
        # A factor, not a choice: its gradient is NaN as well.
        logits = logits * torch.where(is_nan, torch.nan, 1.0).unsqueeze(-1)
        return logits.masked_fill(impossible, -torch.inf)


@dataclass(frozen=True)
class Job:
    """What is trained on what; `repr` is what a failure prints.

    Attributes:
        micro_batch, accumulate, world_size: sequences per micro-batch, micro-batches per rank and
            step, ranks.
        targets: "all" count; "ragged": between none and all of a row; "none-on-last-rank";
            "none-in-first-micro-batch".
        max_norm, rate: as `train` takes them; with a rate, the one of step k is `rate / (k + 1)`,
            but 0 for `idle_step`.
        poisoned_step, poison: the step in which the last rank's loss is "nan", or "inf" with a
            finite gradient, or its gradient alone is not finite ("gradient").
    """

    micro_batch: int = 2
    accumulate: int = 2
    world_size: int = 1
    steps: int = 1
    seed: int = 7
    targets: str = "all"
    max_norm: float | None = None
    rate: float | None = None
    idle_step: int | None = None
    poisoned_step: int | None = None
    poison: str = "nan"

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step."""
        return self.micro_batch * self.accumulate * self.world_size

    def schedule(self, step: int) -> float:
        """The learning rate of the update after `step` finished ones."""
        return 0.0 if step == self.idle_step else (self.rate or 0.0) / (step + 1)

    def step_data(self, step: int) -> Batch:
        """The whole batch of a step: ids and targets [global_batch, LENGTH]."""
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + step)
        shape = (self.global_batch, LENGTH)
        ids = torch.randint(0, POISON, shape, generator=generator)
        targets = torch.randint(0, POISON, shape, generator=generator)
        self._mask(targets, generator)
        if step == self.poisoned_step:
            row = self.rows(self.world_size - 1, self.accumulate - 1).start
            places: dict[str, Any] = {"nan": slice(None), "inf": 0, "gradient": -1}
            ids[row, places[self.poison]] = POISON
            targets[row] = 0
        return ids, targets

    def _mask(self, targets: torch.Tensor, generator: torch.Generator) -> None:
        if self.targets == "ragged":
            lengths = torch.randint(0, LENGTH + 1, (len(targets), 1), generator=generator)
            lengths[0] = LENGTH  # one row counts in full, so that a step always has a target
            targets[torch.arange(LENGTH) >= lengths] = IGNORED
        elif self.targets == "none-on-last-rank":
            for micro in range(self.accumulate):
                targets[self.rows(self.world_size - 1, micro)] = IGNORED
        elif self.targets == "none-in-first-micro-batch":
            for rank in range(self.world_size):
                targets[self.rows(rank, 0)] = IGNORED

    def rows(self, rank: int, micro: int) -> slice:
        """The rows of a step's batch that are micro-batch `micro` of `rank`."""
        first = (micro * self.world_size + rank) * self.micro_batch
        return slice(first, first + self.micro_batch)

    def micro_batches(self, rank: int, *, end: int | None = None) -> Iterator[Batch]:
        """This rank's micro-batches of the steps before `end`, without end if none is given."""
        for step in itertools.count() if end is None else range(end):
            ids, targets = self.step_data(step)
            for micro in range(self.accumulate):
                rows = self.rows(rank, micro)
                yield ids[rows].clone(), targets[rows].clone()

    def tokens(self, step: int) -> int:
        """How many targets of a step count."""
        return int((self.step_data(step)[1] != IGNORED).sum())

    def tolerance(self) -> Tolerance:
        """Any right loop lies within it: the loss may be formed in float32, as most loops do."""
        terms = self.global_batch * LENGTH
        return rounding(torch.float32, terms=terms, depth=self.steps)


@dataclass
class Trainee:
    """One rank's model, wrapped or plain, its optimizer, and the rates that updates used.

    The optimizer has two groups; where their rates differ, `rates` has both.
    """

    model: nn.Module
    wrapped: nn.Module
    optimizer: torch.optim.Optimizer
    rates: list[Any]

    @classmethod
    def of(
        cls,
        ctx: Context,
        wrapper: str,
        seed: int,
        *,
        kind: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        process_group: Any = None,
    ) -> Trainee:
        """Build it; `wrapper` is "plain", "torch" or a contract function."""
        model = ToyLanguageModel(seed).to(ctx.device)
        if wrapper == "fully_shard":
            ctx.impl.fully_shard(model)
        first, *rest = model.parameters()
        optimizer = kind([{"params": [first]}, {"params": rest}], lr=0.5)
        for group in optimizer.param_groups:
            group["lr"] = 1.0  # no longer that of `optimizer.defaults`
        if wrapper in WRAPPERS:
            options = {"bucket_size_mb": 100 * 4 / 2**20, "process_group": process_group}
            wrapped = replicated(ctx, wrapper, model, **options)
        elif wrapper == "torch":
            wrapped = DistributedDataParallel(model)
        else:
            wrapped = model
        rates: list[Any] = []

        def note(used: torch.optim.Optimizer, *ignored: Any) -> None:
            of_groups = [float(group["lr"]) for group in used.param_groups]
            rates.append(of_groups if len({*of_groups}) > 1 else of_groups[0])

        optimizer.register_step_pre_hook(note)
        return cls(model, wrapped, optimizer, rates)

    def train(
        self, ctx: Context, job: Job, batches: Iterator[Batch], **options: Any
    ) -> list[dict[str, float]]:
        """Call the implementation's loop; its records as plain dicts."""
        asked = {
            "steps": job.steps,
            "global_batch_size": job.global_batch,
            "micro_batch_size": job.micro_batch,
            "max_norm": job.max_norm,
            "lr": job.schedule if job.rate is not None else None,
        }
        records = ctx.impl.train(self.wrapped, self.optimizer, batches, **asked | options)
        return [plain(record) for record in records]

    def weights(self) -> dict[str, torch.Tensor]:
        """Values of the original Parameter objects, by name."""
        named: dict[str, Any] = dict(self.model.named_parameters())
        whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in named.items()}
        return {name: p.detach().clone().cpu() for name, p in whole.items()}


FIELDS = ("loss", "lr", "grad_norm", "tokens")


def plain(record: Any) -> dict[str, float]:
    """A record as a dict, whether it has keys or attributes, numbers or tensors.

    A field that it lacks is the matter of the clauses on records: see `field_of`.
    """
    has_keys = hasattr(record, "keys")
    found: Any = record if has_keys else {n: getattr(record, n, None) for n in FIELDS}
    return {n: float(found[n]) for n in FIELDS if n in found and found[n] is not None}


def trained(
    ctx: Context,
    wrapper: str,
    job: Job,
    *,
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    before: Callable[[Context, Trainee], None] | None = None,
    each: Callable[[Batch], Batch] = tuple,  # type: ignore[assignment]  # a pair stays one
    ends: Sequence[int] | None = None,
    calls: Sequence[int] = (),
    environment: dict[str, str] | None = None,
    may_raise: refusal.Kinds = (),
    **options: Any,
) -> dict[str, Any]:
    """Calls of `train`: weights, records, rates used, batches taken, kinds of the error.

    Args:
        kind: of the optimizer.
        before: what is done to the trainee before.
        each: what is made of each batch.
        ends: how many micro-batches there are, by rank; without end if left out.
        calls: the steps of each call, one of the whole job if left out.
        environment: variables that are set meanwhile.
        may_raise: errors that are noted.
        options: of `train`, in place of the job's.
    """
    trainee = Trainee.of(ctx, wrapper, job.seed, kind=kind)
    if before is not None:
        before(ctx, trainee)
    own = itertools.islice(job.micro_batches(ctx.rank), None if ends is None else ends[ctx.rank])
    taken: list[Batch] = []
    records = []

    def noted() -> Iterator[Batch]:
        for batch in map(each, own):
            taken.append(batch)
            yield batch

    batches = noted()
    with refusal.caught(may_raise) as error, mock.patch.dict(os.environ, environment or {}):
        for steps in calls or (job.steps,):
            records += trainee.train(ctx, replace(job, steps=steps), batches, **options)
    return {
        "weights": trainee.weights(),
        "records": records,
        "rates": trainee.rates,
        "taken": len(taken),
        "kinds": error["kinds"],
    }


def wrapper_at(world: Any, wrapper: str = "ddp") -> str:
    """A plain model, which belongs to one process, in place of `ddp` where there is one."""
    return "plain" if world.size == 1 and wrapper == "ddp" else wrapper


def each_has(
    world: Any,
    wrapper: str,
    job: Job,
    seen: Callable[[dict[str, Any]], Any],
    wanted: Any,
    quantity: str,
    **asked: Any,
) -> None:
    """On every rank `seen` of what `trained` returns must be what is wanted.

    Args:
        asked: of `trained`.
    """
    __tracebackhide__ = True
    ranks = world.run(trained, wrapper, job, **asked)
    judge.equal([seen(rank) for rank in ranks], wanted, quantity=quantity, given=str(job))


def field_of(ranks: Sequence[dict[str, Any]], field: str) -> list[list[float]]:
    """A field of all records, per rank; every record must have it."""
    __tracebackhide__ = True
    for number, rank in enumerate(ranks):
        for step, record in enumerate(rank["records"], start=1):
            judge.holds(
                field in record,
                f"rank {number}, step {step}: expected a record with {field!r}, got "
                f"{', '.join(record) or 'none of ' + ', '.join(FIELDS)}",
            )
    return [[record[field] for record in rank["records"]] for rank in ranks]


def series(ranks: Sequence[dict[str, Any]], field: str) -> list[dict[str, torch.Tensor]]:
    """A field of all records, per rank, as one tensor of that name."""
    __tracebackhide__ = True
    return [as_series(field, numbers) for numbers in field_of(ranks, field)]


def as_series(field: str, numbers: Sequence[float]) -> dict[str, torch.Tensor]:
    """Numbers in the form in which `series` gives them."""
    return {field: torch.tensor(numbers, dtype=torch.float64)}


# ------------------------------------------------------------------------------- one process


@dataclass(frozen=True)
class Alone:
    """What one process with the whole batch does: weights after each step, and the records."""

    weights: list[dict[str, torch.Tensor]]
    losses: list[float]
    norms: list[float]

    @property
    def last(self) -> dict[str, torch.Tensor]:
        """Weights at the end."""
        return self.weights[-1]


def alone(
    job: Job, *, weighting: str | tuple[int, ...] = "tokens", last_has: int | None = None
) -> Alone:
    """The oracle; `weighting` is how targets are weighed, "tokens" the right way.

    Args:
        weighting: "means" of micro-batches' means, the "last" micro-batch of every rank only, its
            "share" of the whole mean, and some ranks only are wrong values that have names.
        last_has: how many micro-batches of every rank the last step has; None for all.
    """
    model = ToyLanguageModel(job.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    found = Alone([_values(model)], [], [])
    for step in range(job.steps):
        optimizer.zero_grad()
        micros = last_has if step == job.steps - 1 and last_has else job.accumulate
        loss = _loss(model, job, step, weighting, range(micros))
        loss.backward()
        limit = math.inf if job.max_norm is None else job.max_norm
        found.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
        if job.rate is not None:
            optimizer.param_groups[0]["lr"] = job.schedule(step)
        optimizer.step()
        found.losses.append(float(loss.detach()))
        found.weights.append(_values(model))
    return found


def _loss(
    model: nn.Module, job: Job, step: int, weighting: str | tuple[int, ...], micros: Sequence[int]
) -> torch.Tensor:
    ids, targets = job.step_data(step)
    losses = F.cross_entropy(
        model(ids).flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
    ).view_as(targets)
    counts = (targets != IGNORED).float()
    if weighting == "means":
        parts = [job.rows(rank, m) for rank in range(job.world_size) for m in range(job.accumulate)]
        means = [losses[rows].sum() / counts[rows].sum().clamp(min=1) for rows in parts]
        return torch.stack(means).mean()
    count = len(micros) if weighting == "share" else 1
    micros = micros[-1:] if weighting in ("last", "share") else micros
    ranks = weighting if isinstance(weighting, tuple) else range(job.world_size)
    parts = [job.rows(rank, micro) for rank in ranks for micro in micros]
    total = torch.stack([counts[rows].sum() for rows in parts]).sum() * count
    return torch.stack([losses[rows].sum() for rows in parts]).sum() / total.clamp(min=1)


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}
