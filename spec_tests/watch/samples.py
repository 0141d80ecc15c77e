"""The norms of samples: divided among ranks and workers, in a new order each epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spec_tests.watch.norm import Finding, norm
from spec_tests.watch.run import Step

_SAMPLER = "docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler"
_ITERABLE = "docs.pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset"
_RANDOMNESS = "docs.pytorch.org/docs/stable/notes/randomness.html#dataloader"
_ENOUGH = 12  # samples of two ranks that are equal; none within a rank, so that it is no chance


def _feeds(step: Step, peers: list[int]) -> dict[int, Any]:
    """Return rank to what it said of its loader; {} unless all of some ranks said something."""
    feeds = {rank: step.events[rank]["feed"] for rank in peers}
    return feeds if len(peers) > 1 and all(feeds.values()) else {}


@norm("watch.samples.one-split", source=_SAMPLER)
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
                place, is_advice = step.events[rank]["feed"]["place"], bool(step.doubt)
                yield Finding(
                    "watch.samples.one-split",
                    f"rank {rank}: expected {wrong[0]}",
                    step.number,
                    rank,
                    place=place,
                    likely=step.ask(wrong[1]),
                    is_advice=is_advice or first["size"] != split["size"],
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


@norm("watch.samples.workers-divide", source=_ITERABLE)
def workers_divide(step: Step) -> Iterator[Finding]:
    """Workers that load one stream MUST divide it, so that each sample is loaded once."""
    for rank, event in step.events.items():
        times = (event["feed"] or {"doubled": 0})["doubled"]
        if times:
            yield Finding(
                "watch.samples.workers-divide",
                f"rank {rank}: expected other batches from each of {times} workers, got the same "
                f"ones, so that each sample is trained on {times} times",
                step.number,
                rank,
                place=event["feed"]["place"],
                likely="the IterableDataset does not ask get_worker_info() for its part",
            )
            return


@norm("watch.samples.divided", source=_SAMPLER)
def samples_divided(step: Step) -> Iterator[Finding]:
    """Data-parallel ranks SHOULD divide the samples of an epoch among them."""
    for peers in step.peers():
        for rank, feed in _feeds(step, peers).items():
            number, of = step.run.rows.get(rank, (0, {}))
            of = of if number == feed["pass"] else {}
            step.run.rows[rank] = (feed["pass"], of)
            for row in feed["rows"]:
                of[row] = of.get(row, 0) + 1
        feeds = _feeds(step, peers)
        rows = [step.run.rows[rank][1] for rank in feeds]
        for rank, own in zip(feeds, rows, strict=True):
            both = len(own.keys() & rows[0].keys()) if rank != peers[0] else 0
            again = max(sum(of.values()) - len(of) for of in (own, rows[0]))
            if both >= _ENOUGH and 5 * again < both:
                yield Finding(
                    "watch.samples.divided",
                    f"rank {rank}: expected samples of its own in an epoch, got {both} of "
                    f"{sum(own.values())} that rank {peers[0]} had in the same one",
                    step.number,
                    rank,
                    place=feeds[rank]["place"],
                    likely="each rank shuffles all samples: the loader has no DistributedSampler",
                )
                return


@norm("watch.samples.shuffled-anew", source=_SAMPLER)
def shuffled_anew(step: Step) -> Iterator[Finding]:
    """A DistributedSampler that shuffles SHOULD be given the epoch before each pass."""
    for rank, event in step.events.items():
        feed = event["feed"]
        if feed and feed["again"]:
            yield Finding(
                "watch.samples.shuffled-anew",
                f"rank {rank}: expected the samples in a new order, got epoch "
                f"{feed['split']['epoch']} of the sampler again, and so the order of that epoch",
                step.number,
                rank,
                place=feed["place"],
                likely="sampler.set_epoch(epoch) is not called before the loader is iterated",
            )
            return


@norm("watch.samples.draws-differ", source=_RANDOMNESS)
def draws_differ(step: Step) -> Iterator[Finding]:
    """Random numbers that samples are made with SHOULD differ between data-parallel ranks."""
    for peers in step.peers():
        feeds = _feeds(step, peers)
        draws = [{*feed["draws"]} for feed in feeds.values()]
        same = set.intersection(*draws) if draws else set()
        if same:
            names = " and ".join(sorted({word.partition(":")[0] for word in same}))
            names = names.replace("random", "Python's random")
            yield Finding(
                "watch.samples.draws-differ",
                f"ranks {peers[0]} to {peers[-1]}: loading a batch draws random numbers from "
                f"{names}, whose state is the same on all ranks",
                step.number,
                place=feeds[peers[0]]["place"],
                likely="one seed for all ranks, and the workers' seeds are made of it: samples are "
                "augmented alike; right if that is meant",
            )
            return


CHECKS = (one_split, workers_divide, samples_divided, shuffled_anew, draws_differ)
"""Those that are asked of each step."""
