"""The norms of what a step is given: batches, their samples, buffers, random states."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from spec_tests.watch.norm import About, Finding, rank_norm, step_norm
from spec_tests.watch.run import Event, Step

_DDP = "docs.pytorch.org/docs/stable/notes/ddp.html"
_DOCS = "docs.pytorch.org/docs/stable/data.html#torch.utils.data"
_SAMPLER = f"{_DOCS}.distributed.DistributedSampler"
_RANDOMNESS = "docs.pytorch.org/docs/stable/notes/randomness.html"
_LEAST = 16  # elements of an input: two smaller ones may be equal by chance
_ENOUGH = 12  # samples of two ranks that are equal; none within a rank, so that it is no chance
_HALF = 11  # bits of the mantissa of a 16-bit number, at most
_FEW = 3  # steps that show how many forwards a step has
_KEPT = 200_000  # batches: a run that has more is not looked at further
_PASSES = 4  # that a rank may be in by turns, each over a loader of its own


@step_norm("watch.batches.distinct", source=_SAMPLER, about=About.PEERS)
def batches_distinct(step: Step) -> Iterator[Finding]:
    """A rank MUST NOT train on the batch that another data-parallel rank has in the same step."""
    for first, rank in step.pairs():
        ours, theirs = (_batches(step.events[r]) for r in (rank, first))
        same = [a for a, b in zip(ours, theirs, strict=False) if a == b and _size(a) >= _LEAST]
        # Noise, or the prompts of a second model, may be the same on purpose; one model's tokens
        # not.
        roots = {forward["root"] for forward in step.events[rank]["forwards"]}
        are_tokens = any(dtype.startswith(("int", "uint")) for b in same[:1] for _, dtype, _ in b)
        is_one = len(roots) == 1 and are_tokens
        if not same or not (len(same) == len(ours) or is_one):
            continue
        is_sure = _compare_with_the_same(step, (rank, first), len(same) == len(ours))
        if is_sure is not False:
            likely = "the loader does not know the rank: no DistributedSampler, no offset, one seed"
            yield step.finding(
                rank,
                f"expected a batch of its own, got the inputs of rank {first} in {len(same)} of "
                f"the step's {len(ours)} micro-batches",
                place=step.events[rank]["forwards"][0]["place"],
                likely=likely + "; right if its targets are others" * (is_sure is None),
                is_advice=is_sure is None,
            )


def _compare_with_the_same(step: Step, ranks: tuple[int, int], is_whole: bool) -> bool | None:
    """Return whether two ranks compare outputs with the same targets; None where that is unknown.

    Targets differ where each rank trains on its own nodes of one graph or its own views of a scene.

    Args:
        is_whole: all micro-batches of the step have the same inputs.
    """
    mine, theirs = (step.events[rank]["targets"] for rank in ranks)
    are_seen = bool(mine and theirs)
    if not is_whole or (are_seen and {*mine}.isdisjoint(theirs)):
        return not are_seen or not {*mine}.isdisjoint(theirs)
    one, other = (step.events[rank]["loss"] for rank in ranks)
    # Losses that differ have other targets, unless the forward is random or the weights differ.
    is_off = None not in (one, other) and not math.isclose(one, other, rel_tol=1e-3)
    is_off = is_off and not any(f["drops"] for r in ranks for f in step.events[r]["forwards"])
    is_off = is_off and not any(step.unequal("before", every=True))
    if are_seen:
        return True if mine == theirs and not is_off else None
    if is_off:
        return False
    # Losses of other targets may be equal too: before the first step, if the last layer is zeros,
    # and where they are rounded to 16 bits.
    is_exact = step.number > 1 and one is not None and one == other
    return True if is_exact and math.frexp(one)[0] * 2**_HALF % 1 > 0 else None


@step_norm("watch.batches.not-repeated", source=_SAMPLER, about=About.PEERS)
def batches_not_repeated(step: Step) -> Iterator[Finding]:
    """A rank MUST NOT train on a batch that another rank has had earlier in the same epoch."""
    run, seen = step.run, step.run.seen
    for peers in step.peers() if len(seen) < _KEPT else ():
        batches = [
            (at, rank, batch, *seen.get(batch, (rank, math.inf)))
            for rank in peers
            for at, batch in enumerate(_large(step.events[rank]))
        ]
        again = [each for each in batches if each[-1] < step.number]
        # A rank that begins its own data again is in a new epoch.
        run.looped = run.looped or any(rank == other for _, rank, _, other, _ in again)
        # So are ranks that all get what was had before.
        new = {at for at, *_, number in batches if number == math.inf and not run.looped}
        for _, rank, batch, other, number in (each for each in again if each[0] in new):
            epoch = (step.events[rank]["feed"] or {}).get("epoch", 0)
            repeated = run.repeated.setdefault((rank, epoch), set())
            repeated.add(batch)
            # One alone may fill up the last batch, or the time of a rank whose data has ended.
            if len(repeated) > 1:
                yield step.finding(
                    rank,
                    f"expected new data, got the batch that rank {other} had in step {number}",
                    place=step.events[rank]["forwards"][0]["place"],
                    likely="ranks walk through the same data with different offsets",
                )
    for rank, event in step.events.items():
        for batch in _large(event):
            if len(seen) < _KEPT:
                seen.setdefault(batch, (rank, step.number))


def _batches(event: Any) -> list[tuple[Any, ...]]:
    """Return the inputs of each training forward, as far as they came from outside."""
    all_inputs = ([(h, d, tuple(s)) for h, d, s in f["inputs"]] for f in event["forwards"])
    return [tuple(inputs) for inputs in all_inputs if inputs]


def _large(event: Any) -> list[tuple[Any, ...]]:
    """Return the inputs that are too large to be equal by chance."""
    return [batch for batch in _batches(event) if _size(batch) >= _LEAST]


def _size(batch: tuple[Any, ...]) -> int:
    """Return the elements of the largest input."""
    return max(math.prod(shape) for _, _, shape in batch)


@step_norm("watch.steps.same", source=_DDP, about=About.PEERS)
def steps_same(step: Step) -> Iterator[Finding]:
    """All ranks MUST take the same steps: none skips an update that another one takes."""
    windows = {rank: len(event["forwards"]) for rank, event in step.events.items()}
    few, many = min(windows.values()), max(windows.values())
    usual = step.run.usual.setdefault(step.optimizer, set())
    is_usual = usual == {few} and step.number > _FEW
    usual |= {*windows.values()}
    if few == many:
        return
    rank = next(r for r, n in windows.items() if n == many)
    backwards = {event["backwards"] for event in step.events.values()}
    if len(backwards) == 1 and (both := min(backwards)):
        if both != few and not is_usual:  # a backward of several forwards, as of an episode's
            return
        yield step.finding(
            rank,
            f"expected {few} training forward{'s' * (few > 1)} before step {step.number} as on the "
            f"other ranks, got {many}, with {both} backward{'s' * (both > 1)} on all",
            place=step.events[rank]["forwards"][0]["place"],
            likely="an evaluation on this rank alone, without model.eval() and torch.no_grad()",
            is_advice=True,
        )
    elif few and many % few == 0 and len({e["seen"] for e in step.events.values()}) > 1:
        yield step.finding(
            rank,
            f"expected step {step.number} after {few} micro-batch{'es' * (few > 1)} as on the "
            f"other ranks, got it after {many}: it skipped an update",
            likely="each rank decides for itself, for example by its own gradients being finite",
        )


@step_norm("watch.replicas.buffers", source=_DDP, about=About.PEERS)
def buffers_equal(step: Step) -> Iterator[Finding]:
    """Floating-point buffers SHOULD be equal on all ranks when a forward begins."""
    for first, rank in step.pairs():
        forwards = zip(*(step.events[r]["forwards"] for r in (first, rank)), strict=False)
        for index, (theirs, ours) in enumerate(forwards):
            wanted, got = theirs["buffers"], ours["buffers"]
            wrong = [name for name in wanted if got.get(name, wanted[name]) != wanted[name]]
            if wrong:
                is_old = step.number > 1 or index
                yield step.finding(
                    rank,
                    f"expected the buffer of rank {first}, got another one ({len(wrong)} of "
                    f"{len(wanted)} buffers)",
                    wrong[0],
                    place=ours["place"],
                    likely="each rank updates it by its own batches, as running statistics: "
                    "reduce or broadcast it (SyncBatchNorm, broadcast_buffers=True)"
                    if is_old
                    else "they begin unequal: each rank made its own, and nothing broadcast them",
                )


@step_norm("watch.dropout.differs", source=_RANDOMNESS, about=About.PEERS)
def dropout_differs(step: Step) -> Iterator[Finding]:
    """Data-parallel ranks SHOULD drop different elements: their random states differ."""
    for peers in step.peers():
        pairs = zip(*(step.events[rank]["forwards"] for rank in peers), strict=False)
        drops = [pair for pair in pairs if all(forward["drops"] for forward in pair)]
        if len(peers) > 1 and drops and all(len({f["random"] for f in p}) == 1 for p in drops):
            yield step.finding(
                None,
                f"ranks {peers[0]} to {peers[-1]}: the random state is the same on all ranks in "
                "every forward, so what these draw is equal, such as dropout masks",
                place=drops[0][0]["place"],
                likely="one seed for all ranks: add the rank to it once the weights are made; "
                "right if ranks are to draw the same",
            )


def _feeds(step: Step) -> Iterator[dict[int, Any]]:
    """Yield rank to what it said of its loader, of peers that all said something."""
    for peers in step.peers():
        feeds = {rank: step.events[rank]["feed"] for rank in peers}
        if len(peers) > 1 and all(feeds.values()):
            yield feeds


@step_norm("watch.samples.one-split", source=_SAMPLER, about=About.PEERS)
def one_split(step: Step) -> Iterator[Finding]:
    """Ranks MUST divide one order of the samples: each its own part, with one seed and epoch."""
    for feeds in _feeds(step):
        splits = {rank: feed["split"] for rank, feed in feeds.items()}
        if not all(s and s["parts"] > 1 for s in splits.values()):
            continue
        first = min(splits)
        for rank, split in splits.items():
            wrong = _wrong_part(splits, rank, split) or _other_order(splits[first], split, first)
            if wrong:
                yield step.finding(
                    rank,
                    f"expected {wrong[0]}",
                    place=feeds[rank]["place"],
                    likely=wrong[1],
                    is_advice=splits[first]["size"] != split["size"],
                )


def _wrong_part(splits: dict[int, Any], rank: int, own: Any) -> tuple[str, str] | None:
    """Return in words whether a rank has the part of another one, where each has one."""
    same = [r for r, s in splits.items() if s["part"] == own["part"] and r < rank]
    if not same or any(s["parts"] != len(splits) for s in splits.values()):
        return None
    words = f"a part of its own of {own['parts']}, got part {own['part']} of rank {same[0]}"
    return f"{words} from its DistributedSampler", "the sampler is given the rank of another rank"


def _other_order(first: Any, own: Any, rank: int) -> tuple[str, str] | None:
    """Return in words how the order that a rank divides differs from that of another one."""
    if first["parts"] != own["parts"]:
        return None
    if first["size"] != own["size"]:
        words = f"a DistributedSampler of {first['size']} samples as on rank {rank}"
        return f"{words}, got one of {own['size']}", "the ranks' data sets are of different size"
    orders = [(s["seed"] + s["epoch"], s["shuffle"]) for s in (first, own)]
    if orders[0] == orders[1] or not (first["shuffle"] or own["shuffle"]):
        return None
    asked, got = (
        ", ".join(f"{name} {split[name]}" for name in ("shuffle", "seed", "epoch"))
        for split in (first, own)
    )
    words = f"a DistributedSampler with {asked} as on rank {rank}, got {got}"
    return words, "each rank divides an order of its own, so that samples are missed or repeated"


@rank_norm("watch.samples.workers-divide", source=f"{_DOCS}.IterableDataset")
def workers_divide(step: Step, rank: int, event: Event) -> Finding | None:
    """Workers that load one stream MUST divide it, so that each sample is loaded once."""
    feed = event["feed"]
    if not feed or not feed["doubled"]:
        return None
    return step.finding(
        rank,
        f"expected other batches from each of {feed['doubled']} workers, got the same ones, so "
        f"that each sample is trained on {feed['doubled']} times",
        place=feed["place"],
        likely="the IterableDataset does not ask get_worker_info() for its part",
    )


_SHARED = {
    "rows": "each rank shuffles all samples: the loader has no DistributedSampler",
    "indices": "each rank's sampler draws from all samples of one data set; right if ranks are "
    "meant to augment the same ones",
}


@step_norm("watch.samples.divided", source=_SAMPLER, about=About.PEERS)
def samples_divided(step: Step) -> Iterator[Finding]:
    """Data-parallel ranks SHOULD divide the samples of an epoch among them."""
    for feeds in _feeds(step):
        seen = {rank: _epoch(step, rank, feed) for rank, feed in feeds.items()}
        if not all(_is_whole(step.events[rank]) for rank in feeds):
            continue
        is_one = len({feed["data"] for feed in feeds.values()}) == 1
        first, *others = feeds
        for rank, kind in ((r, k) for r in others for k in [*_SHARED][: 1 + is_one]):
            own, theirs = seen[rank][kind], seen[first][kind]
            both = len(own.keys() & theirs.keys())
            again = max(sum(of.values()) - len(of) for of in (own, theirs))
            is_same = feeds[rank]["epoch"] == feeds[first]["epoch"]
            if is_same and both >= max(_ENOUGH, step.run.world) and 5 * again < both:
                yield step.finding(
                    rank,
                    f"expected samples of its own in an epoch, got {both} of {sum(own.values())} "
                    f"that rank {first} had in the same one",
                    place=feeds[rank]["place"],
                    likely=_SHARED[kind],
                )


def _epoch(step: Step, rank: int, feed: Any) -> dict[str, Counter[int]]:
    """Return how often a rank had which samples, by hash and by index, in its pass so far."""
    passes = step.run.passes.setdefault(rank, {})
    if feed["epoch"] not in passes and len(passes) == _PASSES:
        del passes[min(passes)]
    seen: dict[str, Counter[int]] = passes.setdefault(
        feed["epoch"], {kind: Counter() for kind in _SHARED}
    )
    for kind, of in seen.items():
        of.update(feed[kind])
    return seen


def _is_whole(event: Any) -> bool:
    """Return whether a rank trains on its loader's batch, and not on a part that it cuts out."""
    shapes = [shape for forward in event["forwards"] for _, _, shape in forward["inputs"]]
    return any(shape[:1] == [event["feed"]["size"]] for shape in shapes) and not any(
        forward["talks"] for forward in event["forwards"]
    )


@rank_norm("watch.samples.shuffled-anew", source=_SAMPLER)
def shuffled_anew(step: Step, rank: int, event: Event) -> Finding | None:
    """A sampler that shuffles by the epoch SHOULD be given the epoch before each pass."""
    feed = event["feed"]
    if not feed or not feed["again"]:
        return None
    order = "the order of an earlier pass again"
    if feed["split"] is not None:
        epoch = feed["split"]["epoch"]
        order = f"epoch {epoch} of the sampler again, and so the order of that epoch"
    return step.finding(
        rank,
        f"expected the samples in a new order, got {order}",
        place=feed["place"],
        likely="sampler.set_epoch(epoch) is not called before the loader is iterated",
    )


@step_norm("watch.samples.draws-differ", source=f"{_RANDOMNESS}#dataloader", about=About.PEERS)
def draws_differ(step: Step) -> Iterator[Finding]:
    """Random numbers that samples are made with SHOULD differ between data-parallel ranks."""
    for feeds in _feeds(step):
        same = set.intersection(*({*feed["draws"]} for feed in feeds.values()))
        if same:
            names = " and ".join(sorted({word.partition(":")[0] for word in same}))
            names = names.replace("random", "Python's random")
            yield step.finding(
                None,
                f"ranks {min(feeds)} to {max(feeds)}: loading a batch draws random numbers from "
                f"{names}, whose state is the same on all ranks",
                place=feeds[min(feeds)]["place"],
                likely="one seed for all ranks, and the workers' seeds are made of it: samples are "
                "augmented alike; right if that is meant",
            )
