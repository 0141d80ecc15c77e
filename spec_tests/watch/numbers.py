"""The norms of the numbers of a step: finite, moved by it, clipped whole; what its losses weigh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from spec_tests.watch.norm import About, Finding, rank_norm, step_norm
from spec_tests.watch.run import Event, Step

_JUMP = 5.0  # a schedule changes the rate by less from one step to the next
_LOST = 1e-6  # a smaller step may be lost to rounding, once a loss has come to its least
_FEW_TOKENS = 16  # so few may be the number of something else
_DOCS = "docs.pytorch.org/docs/stable"
_ACCUMULATION = "huggingface.co/blog/gradient_accumulation"


@step_norm("watch.numbers.finite", source=f"{_DOCS}/notes/numerical_accuracy.html")
def numbers_finite(step: Step) -> Iterator[Finding]:
    """Gradients MUST be finite when an optimizer steps with them, and so MUST its weights."""
    bad = {r: e for r, e in step.events.items() if e["bad"]["grads"] and not e["skips"]}
    if not bad:
        yield from _loss_finite(step)
        return
    # Once gradients are reduced all ranks have them: the rank whose loss was bad comes first.
    rank = next((r for r, event in bad.items() if _bad_losses(event)), min(bad))
    found, losses = bad[rank]["bad"], _bad_losses(bad[rank])
    kind = "weights before" if found["before"] else "gradients in"
    names = found["before"] or found["grads"]
    yield step.finding(
        rank,
        f"expected finite {kind} the step, got NaN or infinity in {len(names)} of "
        f"{len(step.layout(rank))} tensors",
        names[0],
        place=losses[0]["place"] if losses else None,
        likely="the weights were made so, or an earlier step has made them so"
        if found["before"]
        else _why_bad(losses),
        is_advice=not found["before"] and not found["after"],  # the optimizer left the step out
    )


def _loss_finite(step: Step) -> Iterator[Finding]:
    """A mean over no token: PyTorch gives NaN, with gradients of zero."""
    for rank, event in step.events.items():
        losses = [x for x in event["losses"] if x["is_bad"] and x["tokens"] == 0]
        if losses:
            yield step.finding(
                rank,
                f"expected a finite loss, got NaN or infinity in {len(losses)} of the step's "
                f"{len(event['losses'])} losses",
                place=losses[0]["place"],
                likely=_why_bad(losses),
                is_advice=True,
            )


def _bad_losses(event: Any) -> list[Any]:
    return [each for each in event["losses"] if each["is_bad"] or each["tokens"] == 0]


def _why_bad(losses: list[Any]) -> str:
    if any(loss["tokens"] == 0 for loss in losses):
        return "all targets of a micro-batch are ignored: the mean over no token is NaN"
    return "the loss is not finite" if losses else ""


# ------------------------------------------------------------------------------------ the optimizer


@rank_norm("watch.optimizer.moves", source=f"{_DOCS}/distributed.fsdp.fully_shard.html")
def optimizer_moves(step: Step, rank: int, event: Event) -> Finding | None:
    """A step with gradients and a learning rate above zero MUST move the parameters."""
    rates = [lr for lr, _ in event["options"] if lr]
    if event["moved"] or event["skips"] or event["bad"]["grads"] or not rates:
        return None
    none = all(each is None for each in event["grads"])
    if event["computed"] and (none or (event["cleared"] and not any(event["grads"]))):
        words = "expected gradients in the step, got none, though a backward computed them"
        likely = "they are cleared between backward and step"
        likely += ", or the optimizer holds other tensors" * (not event["cleared"])
    elif step.number > 1 and max(rates) * max(filter(None, event["norms"]), default=0) > _LOST:
        words = "expected the step to change the parameters, got the same bits in all of them"
        likely = "the optimizer steps copies, or undoes its update"
    else:
        return None
    return step.finding(rank, words, likely=likely)


@rank_norm("watch.optimizer.update", source=f"{_DOCS}/optim.html")
def optimizer_update(step: Step, rank: int, event: Event) -> Finding | None:
    """A step MUST change each parameter, or this rank's shard of it, by the optimizer's update."""
    if not event["update"] or event["skips"] or event["bad"]["grads"]:
        return None
    name, off, of = event["update"]
    return step.finding(
        rank,
        f"expected what {event['title']} makes of it, its gradient and its state, got something "
        f"else in {off:,} of {of:,} elements",
        name,
        likely="it shares memory with another parameter, or is written over in the step",
    )


@rank_norm("watch.optimizer.precision", source="Micikevicius et al. 2018, section 3.1")
def optimizer_precision(step: Step, rank: int, event: Event) -> Finding | None:
    """Parameters of 16 bits SHOULD not lose the optimizer's updates to rounding."""
    name, share = event["half"] or ("", 1.0)
    if share >= 0.9 or not any(event["grads"]):
        return None
    return step.finding(
        rank,
        f"the step changed {100 * share:.0f} % of its elements; in the others the update is "
        "smaller than half a unit in the last place",
        name,
        likely="keep the optimizer's parameters in float32, and compute in 16 bits",
    )


@rank_norm("watch.optimizer.resumed", source=f"{_DOCS}/optim.html")
def optimizer_resumed(step: Step, rank: int, event: Event) -> Finding | None:
    """A step after `load_state_dict` SHOULD have the options of the script and the rate loaded."""
    loaded = event["loaded"] or {"replaced": [], "rates": []}
    rates = [lr for lr, _ in event["options"] if lr is not None]
    pairs = zip(loaded["rates"], rates, strict=False)
    jumps = [(a, b) for a, b in pairs if a and b and not 1 / _JUMP <= b / a <= _JUMP]
    if loaded["replaced"]:
        name, was, now = loaded["replaced"][0]
        words = f"expected {name} {was} of the script, got {now} of the state that was loaded"
        likely = "load_state_dict replaces the options that the optimizer was made with"
    elif jumps:
        was, now = jumps[0]
        words = f"expected about lr {was:g} of the state that was loaded, got {now:g}"
        likely = "the schedule begins anew: its own state was not loaded, or it was made after "
        likely += "the optimizer's state was loaded; right if a new rate is meant"
    else:
        return None
    return step.finding(rank, words, place=loaded["place"], likely=likely)


@rank_norm("watch.schedule.per-update", source=f"{_DOCS}/optim.html")
def schedule_per_update(step: Step, rank: int, event: Event) -> Finding | None:
    """A learning-rate schedule SHOULD be stepped once per update, not once per micro-batch."""
    micro = event["backwards"] or len(event["forwards"])
    times, place = event["scheduled"] or (0, "")
    if step.number == 1 or not times == micro > 1:
        return None
    return step.finding(
        rank,
        f"expected one step of the schedule for an update, got {times}, as many as micro-batches",
        place=place,
        likely="scheduler.step() is called for each micro-batch; right if the schedule's length "
        "counts these",
    )


# ----------------------------------------------------------------------------------------- clipping


@step_norm(
    "watch.clip.norm",
    source=f"{_DOCS}/generated/torch.nn.utils.clip_grad_norm_.html",
    about=About.PEERS,
)
def clip_norm(step: Step) -> Iterator[Finding]:
    """Clipping MUST use the norm of the whole gradient that the optimizer steps with."""
    clips = {rank: event["clip"] for rank, event in step.events.items() if event["clip"]}
    whole = _whole_norm(clips) if len(clips) == len(step.events) else None
    for rank, clip in clips.items():
        place = clip["place"]
        if len(clips) < len(step.events):
            rank = next(rank for rank in step.events if rank not in clips)
            words = f"expected clipped gradients as on rank {min(clips)}, got others"
            likely = "only some ranks clip: the others keep the whole gradient"
            yield step.finding(rank, words, place=place, likely=likely)
            return
        if clip["partial"]:  # added to, after they were clipped
            yield step.finding(
                rank,
                f"expected the gradient of {clip['backwards']} micro-batches to be clipped once, "
                f"got it scaled down {clip['partial']} times before it was whole",
                place=place,
                likely="clip_grad_norm_ is called after each backward: earlier micro-batches weigh "
                "less",
                is_advice=True,
            )
        elif whole is not None:
            found = _clipped_otherwise(clip, whole)
            if found:
                yield step.finding(rank, found[0], place=place, likely=found[1], is_certain=True)
        elif _are_equal_replicas(step, clips):
            # Replicated gradients that differed when they were clipped and are equal in the step.
            words = "expected the norm of the reduced gradients, got one of gradients that differ "
            likely = "gradients are clipped before they are reduced"
            words += "between the ranks"
            yield step.finding(rank, words, place=place, likely=likely, is_certain=True)


def _are_equal_replicas(step: Step, clips: dict[int, Any]) -> bool:
    """Return whether ranks have clipped whole gradients, and are seen to step with equal ones."""
    kinds = {part[1] for clip in clips.values() for part in clip["parts"]}
    compared = any(None not in values.values() for _, _, values in step.replicas("grads"))
    return kinds <= {"ddp", "plain"} and compared and not any(step.unequal("grads", every=True))


def _clipped_otherwise(clip: Any, whole: float) -> tuple[str, str] | None:
    """Return in words how one rank's clipping is not by the norm over all ranks, and why."""
    if not clip["norm"] or not clip["clipped"]:
        return None
    used, right = clip["clipped"] / clip["norm"], min(1.0, clip["max"] / (whole + 1e-6))
    if abs(used / right - 1) > 0.03:
        own = _norm([part[0] for part in clip["parts"]], clip["kind"])
        is_own = abs(used / min(1.0, clip["max"] / (own + 1e-6)) - 1) < 0.01 and own != whole
        if clip["given"] and not (is_own and used < 1):
            return None  # a norm of more parameters than these, or of another kind
        words = f"expected gradients scaled by {right:.4g} (norm {whole:.4g} over all ranks), got"
        likely = "the norm of this rank's shards alone was used" if is_own else ""
        return f"{words} {used:.4g}", likely
    ratio = clip["clipped"] / clip["stepped"] if clip["stepped"] else 1.0
    # Without a scaler the script may mean it; of NaN nothing is known.
    if not clip["is_scaled"] or not (ratio < 0.55 or ratio > 1.9):
        return None
    words = f"expected the clipped gradients in the step, got ones {ratio:.4g} times smaller"
    return words, "scaled gradients were clipped: scaler.unscale_(optimizer) comes first"


def _whole_norm(clips: dict[int, Any]) -> float | None:
    """Return the norm over all ranks; None where replicated parts differ between the ranks."""
    kind = next(iter(clips.values()))["kind"]
    if any(part[1] == "tensor" for clip in clips.values() for part in clip["parts"]):
        return None  # tensor parallelism: which parts are the same is not known
    alike = [[p[0] for p in c["parts"] if p[1] in ("ddp", "plain")] for c in clips.values()]
    for other in alike[1:]:
        if len(other) != len(alike[0]):
            return None
        if any(abs(x - y) > 1e-3 * abs(y) for x, y in zip(other, alike[0], strict=True)):
            return None
    parts = {}
    for rank, clip in clips.items():
        for index, (value, of, shard) in enumerate(clip["parts"]):
            if of not in ("ddp", "plain"):
                parts[index, tuple(shard) if of == "sharded" else rank] = value
    return _norm([*alike[0], *parts.values()], kind)


def _norm(parts: Sequence[float], kind: float) -> float:
    is_largest = kind == float("inf")
    return max(parts) if is_largest else float(sum(part**kind for part in parts) ** (1 / kind))


# --------------------------------------------------------------------------------------- the losses


@step_norm("watch.loss.weights", source=_ACCUMULATION)
def loss_weights(step: Step) -> Iterator[Finding]:
    """The mean losses of an update's micro-batches SHOULD be divided by their number, once."""
    weights = {rank: _micro_batches(event) for rank, event in step.events.items()}
    if not all(weights.values()):
        return
    rank = min(weights)
    count, each = len(weights[rank]), weights[rank][0]
    every = _micro_batches(step.events[rank], is_every=True)
    before = step.run.weights.setdefault(step.optimizer, (step.number, count, each))
    is_mean = all(x["of"] != "sum" for e in step.events.values() for x in e["losses"])
    if is_mean and count != before[1] and all(_is(w / before[2], 1) for w in weights[rank]):
        words = f"{count} micro-batches weigh {each:.3g} each and {count * each:.3g} together, "
        words = words if count > 1 else f"1 micro-batch weighs {each:.3g}, "
        words += f"while {before[1]} in step {before[0]} weighed {before[1] * before[2]:.3g}"
        likely = "the loss is divided by a constant, not by the number of micro-batches of this "
        likely += "update (the end of an epoch, or what it left over)"
    elif is_mean and count > 1 and all(_is(w, 1) for of in weights.values() for w in of):
        words = f"each of {count} micro-batches weighs 1, so that the update is {count} times "
        words += "their mean"
        likely = f"the loss is not divided by {count}; right if the gradients are, or if the rate "
        likely += "is meant for the sum"
    elif is_mean and len(every) > count == 1 and all(_is(w * len(every), 1) for w in every):
        words = f"gradients of {len(every) - 1} of {len(every)} micro-batches, which weigh "
        words += f"{each:.3g} each, are cleared before the step"
        likely = "zero_grad() is called for each micro-batch, not for each update; right if the "
        likely += "script adds up the gradients itself"
    else:
        words, likely = _divided_twice(step, weights)
    if words:
        place = step.events[rank]["losses"][0]["place"]
        yield step.finding(rank, words, place=place, likely=likely)


def _micro_batches(event: Any, *, is_every: bool = False) -> list[float]:
    """Return what each micro-batch weighs; [] where losses are not known to be micro-batches."""
    known = [x for x in event["losses"] if x["weight"] is not None]
    losses = [x for x in known if is_every or not x["is_cleared"]]
    if len({x["path"] for x in losses}) != 1 or len({x["task"] for x in losses}) != len(losses):
        return []  # several losses of one batch
    return [x["weight"] * (x["tokens"] if x["of"] == "sum" else 1) / event["scale"] for x in losses]


def _divided_twice(step: Step, weights: dict[int, list[float]]) -> tuple[str, str]:
    """Return in words by what the losses were divided twice, if so, and why that is likely."""
    events = step.events
    if all(_is(w * len(of), 1) for of in weights.values() for w in of):
        return "", ""  # divided by the number of micro-batches, which may be that of the tokens
    tokens = {
        r: [x["tokens"] for x in e["losses"] if not x["is_cleared"]] for r, e in events.items()
    }
    pairs = [p for r, of in weights.items() for p in zip(of, tokens[r], strict=False)]
    for times in (1, max(map(len, weights.values()))):
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
    if not (averages and is_whole and _is(sum(map(sum, weights.values())), 1)):
        return "", ""
    words = f"the losses of an update weigh {1 / len(events):.3g} on each rank, where a mean "
    likely = "the loss is divided by the number of ranks, and DDP's mean divides it again; right "
    return f"{words}weighs 1", f"{likely}if it is scaled on purpose"


def _is(value: float, wanted: float) -> bool:
    return abs(value - wanted) < 1e-3 * wanted


@step_norm("watch.loss.token-counts", source=_ACCUMULATION)
def token_counts(step: Step) -> Iterator[Finding]:
    """Means over unequal token counts SHOULD be weighted by the counts."""
    ranks = [_shares(event["losses"]) for event in step.events.values()]
    # What a batch weighs should grow with its tokens; a mean of means gives all the same.
    totals = [tuple(map(sum, zip(*shares, strict=True))) for shares in ranks if shares]
    for found in (totals, [share for shares in ranks for share in shares]):
        counts = {tokens for tokens, _ in found}
        weights = [weight for _, weight in found]
        if len(counts) < 2 or max(weights) - min(weights) > 1e-4 * abs(max(weights)):
            continue
        yield step.finding(
            None,
            f"ranks {min(step.events)} to {max(step.events)}: losses are means over {min(counts)} "
            f"to {max(counts)} tokens and count alike, so that one token counts up to "
            f"{max(counts) / max(1, min(counts)):.2f} times as much as another",
            place=next(e["losses"] for e in step.events.values() if e["losses"])[0]["place"],
            likely="divide sums by the token count of the whole step, over all ranks and "
            "micro-batches",
        )


def _shares(losses: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """Return the tokens of each loss, and what all of them together weigh."""
    return [
        (x["tokens"], x["weight"] * (1 if x["of"] == "mean" else x["tokens"]))
        for x in losses
        if x["weight"] and x["tokens"]
    ]
