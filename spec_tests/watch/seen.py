"""Which norms had something to look at: the others neither hold nor are broken."""

from __future__ import annotations

import math

from spec_tests.watch.norm import NORMS
from spec_tests.watch.run import Step

_ALWAYS = {"watch.run.ends", "watch.run.goes-on"}


def norms_of(step: Step) -> set[str]:
    """Return the ids of the norms that a step could have broken."""
    events = step.events.values()
    forwards = [forward for event in events for forward in event["forwards"]]
    kinds = {e["kind"] for rank in step.events for e in step.layout(rank)}
    many, is_ddp = len(step.events) > 1, "ddp" in kinds
    peers = any(len(group) > 1 for group in step.peers())
    inputs = any(math.prod(s) for forward in forwards for _, _, s in forward["inputs"])
    losses = [loss for event in events for loss in event["losses"]]
    feeds = [event["feed"] for event in events if event["feed"]]
    replicas = any(True for _ in step.replicas("after"))
    given = any(each is not None for event in events for each in event["grads"])
    conditions = {
        "watch.numbers.finite": given,
        "watch.batches.distinct": peers and inputs,
        "watch.batches.not-repeated": peers and inputs,
        "watch.samples.one-split": peers and any(feed["split"] for feed in feeds),
        "watch.samples.workers-divide": any(feed["workers"] > 1 for feed in feeds),
        "watch.samples.divided": peers and any(feed["rows"] or feed["indices"] for feed in feeds),
        "watch.samples.shuffled-anew": any(feed["by_epoch"] for feed in feeds),
        "watch.samples.draws-differ": peers and any(feed["draws"] for feed in feeds),
        "watch.steps.same": many and bool(forwards),
        "watch.replicas.buffers": peers and any(forward["buffers"] for forward in forwards),
        "watch.dropout.differs": peers and any(forward["drops"] for forward in forwards),
        "watch.loss.token-counts": sum(bool(loss["tokens"]) for loss in losses) > 1,
        "watch.loss.weights": bool(losses),
        "watch.optimizer.holds-the-model": step.number > 1,
        "watch.reduction.no-sync": many and any(event["unsynced"] for event in events),
        "watch.reduction.once": many and kinds == {"ddp"},
        "watch.reduction.through-the-wrapper": is_ddp and bool(forwards),
        "watch.reduction.saved": many and is_ddp and any(e["backwards"] > 1 for e in events),
        "watch.reduction.mean": any(event["sums"] for event in events),
        "watch.scaler.unscaled": any(event["scaler"] for event in events),
        "watch.weights.current": any(event["compared"] for event in events),
        "watch.parameters.stay-tied": any(event["tied"] for event in events),
        "watch.replicas.begin-equal": replicas,
        "watch.gradients.equal": replicas and given,
        "watch.replicas.equal": replicas,
        "watch.replicas.unheld": peers and any(event["unheld"] for event in events),
        "watch.clip.norm": any(event["clip"] for event in events),
        "watch.optimizer.same-options": many,
        "watch.optimizer.moves": given,
        "watch.optimizer.update": any(event["sampled"] for event in events),
        "watch.optimizer.precision": any(event["half"] for event in events),
        "watch.optimizer.resumed": any(event["loaded"] for event in events),
        "watch.schedule.per-update": any(event["scheduled"] for event in events),
        "watch.collectives.match": many and all(event["is_complete"] for event in events),
        "watch.steps.as-many": many,
    }
    return {id for id, holds in conditions.items() if holds}


def unseen(saw: set[str], replayed: str) -> set[str]:
    """Return the ids of the norms that no step could have broken."""
    replay = {"watch.replay.gradients"} if replayed else set()
    return NORMS.keys() - saw - _ALWAYS - replay
