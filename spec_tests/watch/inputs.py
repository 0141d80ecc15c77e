"""The norms of what a step is given: batches, buffers, random states."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from spec_tests.watch.norm import Finding, step_norm
from spec_tests.watch.run import Step

_DDP = "docs.pytorch.org/docs/stable/notes/ddp.html"
_DATA = "docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler"
_ENOUGH = 16  # elements of an input: two smaller ones may be equal by chance


@step_norm("watch.batches.distinct", source=_DATA)
def batches_distinct(step: Step) -> Iterator[Finding]:
    """A rank MUST NOT train on the batch that another data-parallel rank has in the same step."""
    for peers in step.peers():
        for rank in peers[1:]:
            ours, theirs = (_batches(step.events[r]) for r in (rank, peers[0]))
            same = [a for a, b in zip(ours, theirs, strict=False) if a == b and _size(a) >= _ENOUGH]
            # Noise, or the prompts of a second model, may be the same on purpose; one model's
            # tokens not.
            roots = {forward["root"] for forward in step.events[rank]["forwards"]}
            is_one = len(roots) == 1 and _are_tokens(same[0]) if same else False
            if same and (len(same) == len(ours) or is_one):
                yield step.finding(
                    rank,
                    f"expected a batch of its own, got the inputs of rank {peers[0]} in "
                    f"{len(same)} of the step's {len(ours)} micro-batches",
                    place=step.events[rank]["forwards"][0]["place"],
                    likely="the loader does not know the rank: no DistributedSampler, no offset, "
                    "one seed",
                    needs_replicas=True,
                )


@step_norm("watch.batches.not-repeated", source=_DATA)
def batches_not_repeated(step: Step) -> Iterator[Finding]:
    """A rank MUST NOT train on a batch that another rank has had earlier in the same epoch."""
    seen = step.run.seen
    for peers in step.peers():
        again = [
            (rank, *seen[batch])
            for rank in peers
            for batch in _batches(step.events[rank])
            if batch in seen and seen[batch][1] < step.number and _size(batch) >= _ENOUGH
        ]
        # A rank that begins its own data again is in a new epoch.
        step.run.looped = step.run.looped or any(rank == other for rank, other, _ in again)
        repeated = [each for each in again if each[0] != each[1]]
        if repeated and not step.run.looped:
            rank, other, number = repeated[0]
            yield step.finding(
                rank,
                f"expected new data, got the batch that rank {other} had in step {number}",
                place=step.events[rank]["forwards"][0]["place"],
                likely="ranks walk through the same data with different offsets",
                needs_replicas=True,
            )
    for rank, event in step.events.items():
        for batch in _batches(event):
            if len(seen) < 200_000:
                seen.setdefault(batch, (rank, step.number))


def _batches(event: Any) -> list[tuple[Any, ...]]:
    """Return the inputs of each training forward, as far as they came from outside."""
    all_inputs = ([(h, d, tuple(s)) for h, d, s in f["inputs"]] for f in event["forwards"])
    return [tuple(inputs) for inputs in all_inputs if inputs]


def _size(batch: tuple[Any, ...]) -> int:
    """Return the elements of the largest input."""
    return max(math.prod(shape) for _, _, shape in batch)


def _are_tokens(batch: tuple[Any, ...]) -> bool:
    return any(dtype.startswith(("int", "uint")) for _, dtype, _ in batch)


@step_norm("watch.steps.same", source=_DDP)
def steps_same(step: Step) -> Iterator[Finding]:
    """All ranks MUST take the same steps: none skips an update that another one takes."""
    if step.is_alone:
        return
    seen = {rank: event["seen"] for rank, event in step.events.items()}
    windows = {rank: len(event["forwards"]) for rank, event in step.events.items()}
    few, many = min(windows.values()), max(windows.values())
    backwards = {event["backwards"] for event in step.events.values()}
    if few < many and len(backwards) == 1 and 0 < min(backwards) <= few:
        rank = next(r for r, n in windows.items() if n == many)
        yield step.finding(
            rank,
            f"expected {few} training forward{'s' * (few > 1)} before step {step.number} as on the "
            f"other ranks, got {many}, with {min(backwards)} backward"
            f"{'s' * (min(backwards) > 1)} on all",
            place=step.events[rank]["forwards"][0]["place"],
            likely="an evaluation on this rank alone, without model.eval() and torch.no_grad()",
            is_advice=True,
        )
        return
    if few and many >= 2 * few and many % few == 0 and len(set(seen.values())) > 1:
        rank = next(r for r, n in windows.items() if n == many)
        yield step.finding(
            rank,
            f"expected step {step.number} after {few} micro-batch{'es' * (few > 1)} as on the "
            f"other ranks, got it after {many}: it skipped an update",
            likely="each rank decides for itself, for example by its own gradients being finite",
        )


@step_norm("watch.replicas.buffers", source=_DDP)
def buffers_equal(step: Step) -> Iterator[Finding]:
    """Floating-point buffers SHOULD be equal on all ranks when a forward begins."""
    for peers in step.peers():
        lists = {rank: step.events[rank]["forwards"] for rank in peers}
        for index in range(min(map(len, lists.values()), default=0)):
            first = lists[peers[0]][index]["buffers"]
            for rank in peers[1:]:
                ours = lists[rank][index]["buffers"]
                wrong = [name for name in first if ours.get(name, first[name]) != first[name]]
                if wrong:
                    likely = "running statistics are each rank's own: broadcast them, or use "
                    likely += "SyncBatchNorm"
                    if step.number == 1 and not index:
                        likely = "they begin unequal: each rank made its own, and nothing broadcast"
                        likely += " them"
                    yield step.finding(
                        rank,
                        f"expected the buffer of rank {peers[0]}, got another one ({len(wrong)} of "
                        f"{len(first)} buffers)",
                        wrong[0],
                        place=lists[rank][index]["place"],
                        likely=likely,
                    )
                    return


@step_norm("watch.dropout.differs", source="docs.pytorch.org/docs/stable/notes/randomness.html")
def dropout_differs(step: Step) -> Iterator[Finding]:
    """Data-parallel ranks SHOULD drop different elements: their random states differ."""
    for peers in step.peers():
        lists = [step.events[rank]["forwards"] for rank in peers]
        pairs = list(zip(*lists, strict=False))
        drops = [pair for pair in pairs if all(forward["drops"] for forward in pair)]
        if len(peers) > 1 and drops and all(len({f["random"] for f in p}) == 1 for p in drops):
            yield step.finding(
                None,
                f"ranks {peers[0]} to {peers[-1]}: the random state is the same on all ranks in "
                "every forward, so their dropout masks are equal",
                place=drops[0][0]["place"],
                likely="one seed for all ranks: add the rank to it once the weights are made",
            )
