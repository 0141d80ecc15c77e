"""The norms of the losses of a step: what each of them weighs in the update."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spec_tests.watch.norm import Finding, step_norm
from spec_tests.watch.run import Step

_ACCUMULATION = "huggingface.co/blog/gradient_accumulation"
_FEW_TOKENS = 16  # so few may be the number of something else


@step_norm("watch.loss.weights", source=_ACCUMULATION)
def loss_weights(step: Step) -> Iterator[Finding]:
    """The mean losses of an update's micro-batches SHOULD be divided by their number, once."""
    weights = {rank: _micro_batches(event) for rank, event in step.events.items()}
    if not all(weights.values()):
        return
    rank = min(weights)
    own, losses = weights[rank], step.events[rank]["losses"]
    count, each = len(own), own[0]
    before = step.run.weights.setdefault(step.optimizer, (step.number, count, each))
    said = None
    is_mean = all(x["of"] != "sum" for e in step.events.values() for x in e["losses"])
    if is_mean and count != before[1] and all(_is(w / before[2], 1) for w in own):
        said = (
            f"{count} micro-batches weigh {each:.3g} each and {count * each:.3g} together, while "
            f"{before[1]} in step {before[0]} weighed {before[1] * before[2]:.3g}",
            "the loss is divided by a constant, not by the number of micro-batches of this update "
            "(the end of an epoch, or what it left over)",
        )
    elif is_mean and count > 1 and all(_is(w, 1) for of in weights.values() for w in of):
        said = (
            f"each of {count} micro-batches weighs 1, so that the update is {count} times their "
            "mean",
            f"the loss is not divided by {count}; right if the learning rate is meant for the sum",
        )
    else:
        said = _divided_twice(step, weights)
    if said:
        yield step.finding(rank, said[0], place=losses[0]["place"], likely=said[1])


def _micro_batches(event: Any) -> list[float]:
    """Return what each micro-batch weighs; [] where losses are not known to be micro-batches."""
    losses = [x for x in event["losses"] if x["weight"] is not None and not x["is_cleared"]]
    if len({x["path"] for x in losses}) != 1 or len({x["task"] for x in losses}) != len(losses):
        return []  # several losses of one batch
    return [x["weight"] * (x["tokens"] if x["of"] == "sum" else 1) / event["scale"] for x in losses]


def _divided_twice(step: Step, weights: dict[int, list[float]]) -> tuple[str, str] | None:
    """Return in words by what the losses were divided twice, and why that is likely."""
    events = step.events
    if all(_is(w * len(of), 1) for of in weights.values() for w in of):
        return None  # divided by the number of micro-batches, which may be that of the tokens
    tokens = {
        r: [x["tokens"] for x in e["losses"] if not x["is_cleared"]] for r, e in events.items()
    }
    pairs = [p for r, of in weights.items() for p in zip(of, tokens[r], strict=False)]
    count = max(map(len, weights.values()))
    for times in (1, count):
        if all((n or 0) >= _FEW_TOKENS and _is(w * n * times, 1) for w, n in pairs):
            few = min(n for _, n in pairs)
            words = f"each loss is a mean over tokens ({few} of them) that weighs 1 / {few * times}"
            return words, "the mean is divided by the number of tokens once more"
    # In DistributedDataParallel each rank's loss counts as 1 / ranks by itself.
    forwards = [f for e in events.values() for f in e["forwards"]]
    losses = [x for e in events.values() for x in e["losses"] if x["weight"]]
    # Half a squared error is no mean over two ranks.
    is_whole = all(x["is_whole"] and x["tokens"] is not None for x in losses)
    averages = all(f["averages"] for f in forwards) and step.run.world == len(events) > 1
    if averages and is_whole and _is(sum(map(sum, weights.values())), 1):
        total = 1 / len(events)
        words = f"the losses of an update weigh {total:.3g} on each rank, where a mean weighs 1"
        return words, (
            "the loss is divided by the number of ranks, and DDP's mean divides it again; right if "
            "it is scaled on purpose"
        )
    return None


def _is(value: float, wanted: float) -> bool:
    return abs(value - wanted) < 1e-3 * wanted


@step_norm("watch.loss.token-counts", source=_ACCUMULATION)
def token_counts(step: Step) -> Iterator[Finding]:
    """Means over unequal token counts SHOULD be weighted by the counts."""
    ranks = [_shares(event["losses"]) for event in step.events.values()]
    batches = [share for shares in ranks for share in shares]
    # What a batch weighs should grow with its tokens; a mean of means gives all the same.
    totals = [tuple(map(sum, zip(*shares, strict=True))) for shares in ranks if shares]
    losses: list[Any] = next((e["losses"] for e in step.events.values() if e["losses"]), [])
    for found in (totals, batches):
        counts = {tokens for tokens, _ in found}
        weights = [weight for _, weight in found]
        if len(counts) < 2 or max(weights) - min(weights) > 1e-4 * abs(max(weights)):
            continue
        yield step.finding(
            None,
            f"ranks {min(step.events)} to {max(step.events)}: losses are means over {min(counts)} "
            f"to {max(counts)} tokens and count alike, so that one token counts up to "
            f"{max(counts) / max(1, min(counts)):.2f} times as much as another",
            place=losses[0]["place"],
            likely="divide sums by the token count of the whole step, over all ranks and "
            "micro-batches",
        )
        return


def _shares(losses: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """Return the tokens of each loss, and what all of them together weigh."""
    return [
        (x["tokens"], x["weight"] * (1 if x["of"] == "mean" else x["tokens"]))
        for x in losses
        if x["weight"] and x["tokens"]
    ]
