"""The norms of samples: divided among ranks and workers, in a new order each epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from spec_tests.watch.norm import Finding, rank_norm, step_norm
from spec_tests.watch.run import Event, Step

_SAMPLER = "docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler"
_ITERABLE = "docs.pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset"
_RANDOMNESS = "docs.pytorch.org/docs/stable/notes/randomness.html#dataloader"
_ENOUGH = 12  # samples of two ranks that are equal; none within a rank, so that it is no chance
_PASSES = 4  # that a rank may be in by turns, each over a loader of its own
_LIKELY = {
    "rows": "each rank shuffles all samples: the loader has no DistributedSampler",
    "indices": "each rank's sampler draws from all samples of one data set; right if ranks are "
    "meant to augment the same ones",
}


def _feeds(step: Step, peers: list[int]) -> dict[int, Any]:
    """Return rank to what it said of its loader; {} unless all of some ranks said something."""
    feeds = {rank: step.events[rank]["feed"] for rank in peers}
    return feeds if len(peers) > 1 and all(feeds.values()) else {}


@step_norm("watch.samples.one-split", source=_SAMPLER)
def one_split(step: Step) -> Iterator[Finding]:
    """Ranks MUST divide one order of the samples: each its own part, with one seed and epoch."""
    for peers in step.peers():
        splits = {rank: feed["split"] for rank, feed in _feeds(step, peers).items()}
        if not splits or not all(s and s["parts"] > 1 for s in splits.values()):
            continue
        first, rest = splits[peers[0]], list(splits.items())[1:]
        for rank, split in rest:
            wrong = _wrong_part(splits, rank, split) or _other_order(first, split, peers[0])
            if wrong:
                yield step.finding(
                    rank,
                    f"expected {wrong[0]}",
                    place=step.events[rank]["feed"]["place"],
                    likely=wrong[1],
                    is_advice=first["size"] != split["size"],
                    needs_replicas=True,
                )
                return


def _wrong_part(splits: dict[int, Any], rank: int, own: Any) -> tuple[str, str] | None:
    """Return in words whether a rank has the part of another one, where each has one."""
    same = [r for r, s in splits.items() if s["part"] == own["part"] and r < rank]
    if (
        not same
        or own["parts"] != len(splits)
        or any(s["parts"] != own["parts"] for s in splits.values())
    ):
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
    asked = ", ".join(f"{name} {first[name]}" for name in ("shuffle", "seed", "epoch"))
    got = ", ".join(f"{name} {own[name]}" for name in ("shuffle", "seed", "epoch"))
    words = f"a DistributedSampler with {asked} as on rank {rank}, got {got}"
    return words, "each rank divides an order of its own, so that samples are missed or repeated"


@rank_norm("watch.samples.workers-divide", source=_ITERABLE)
def workers_divide(step: Step, rank: int, event: Event) -> Finding | None:
    """Workers that load one stream MUST divide it, so that each sample is loaded once."""
    times = (event["feed"] or {"doubled": 0})["doubled"]
    if not times:
        return None
    return step.finding(
        rank,
        f"expected other batches from each of {times} workers, got the same ones, so that each "
        f"sample is trained on {times} times",
        place=event["feed"]["place"],
        likely="the IterableDataset does not ask get_worker_info() for its part",
    )


@step_norm("watch.samples.divided", source=_SAMPLER)
def samples_divided(step: Step) -> Iterator[Finding]:
    """Data-parallel ranks SHOULD divide the samples of an epoch among them."""
    for peers in step.peers():
        feeds = _feeds(step, peers)
        seen = {rank: _epoch(step, rank, feed) for rank, feed in feeds.items()}
        if step.doubt or not all(_is_whole(step.events[rank]) for rank in feeds):
            continue
        is_one = len({feed["data"] for feed in feeds.values()}) == 1
        for rank, kind in ((r, k) for r in [*feeds][1:] for k in ("rows", "indices")[: 1 + is_one]):
            own, first = seen[rank][kind], seen[peers[0]][kind]
            both = len(own.keys() & first.keys())
            again = max(sum(of.values()) - len(of) for of in (own, first))
            is_same = feeds[rank]["epoch"] == feeds[peers[0]]["epoch"]
            if is_same and both >= max(_ENOUGH, step.run.world) and 5 * again < both:
                yield step.finding(
                    rank,
                    f"expected samples of its own in an epoch, got {both} of {sum(own.values())} "
                    f"that rank {peers[0]} had in the same one",
                    place=feeds[rank]["place"],
                    likely=_LIKELY[kind],
                )
                return


def _epoch(step: Step, rank: int, feed: Any) -> dict[str, Counter[int]]:
    """Return how often a rank had which samples, by hash and by index, in its pass so far."""
    passes = step.run.passes.setdefault(rank, {})
    if feed["epoch"] not in passes and len(passes) == _PASSES:
        del passes[min(passes)]
    seen: dict[str, Counter[int]] = passes.setdefault(
        feed["epoch"], {"rows": Counter(), "indices": Counter()}
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
    return step.finding(
        rank,
        f"expected the samples in a new order, got {_order(feed)}",
        place=feed["place"],
        likely="sampler.set_epoch(epoch) is not called before the loader is iterated",
    )


def _order(feed: Any) -> str:
    if feed["split"] is None:
        return "the order of an earlier pass again"
    return f"epoch {feed['split']['epoch']} of the sampler again, and so the order of that epoch"


@step_norm("watch.samples.draws-differ", source=_RANDOMNESS)
def draws_differ(step: Step) -> Iterator[Finding]:
    """Random numbers that samples are made with SHOULD differ between data-parallel ranks."""
    for peers in step.peers():
        feeds = _feeds(step, peers)
        draws = [{*feed["draws"]} for feed in feeds.values()]
        same = set.intersection(*draws) if draws else set()
        if same:
            names = " and ".join(sorted({word.partition(":")[0] for word in same}))
            names = names.replace("random", "Python's random")
            yield step.finding(
                None,
                f"ranks {peers[0]} to {peers[-1]}: loading a batch draws random numbers from "
                f"{names}, whose state is the same on all ranks",
                place=feeds[peers[0]]["place"],
                likely="one seed for all ranks, and the workers' seeds are made of it: samples are "
                "augmented alike; right if that is meant",
            )
            return
