"""The norms of the numbers of a step: finite, moved by it, not lost to rounding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spec_tests.watch.norm import Finding, rank_norm, step_norm
from spec_tests.watch.run import Event, Step

_JUMP = 5.0  # a schedule changes the rate by less from one step to the next
_FSDP = "docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"


@step_norm(
    "watch.numbers.finite", source="docs.pytorch.org/docs/stable/notes/numerical_accuracy.html"
)
def numbers_finite(step: Step) -> Iterator[Finding]:
    """Gradients MUST be finite when an optimizer steps with them, and so MUST its weights."""
    bad = {r: e for r, e in step.events.items() if e["bad"]["grads"] and not e["skips"]}
    if not bad:
        yield from _loss_finite(step)
        return
    # Once gradients are reduced all ranks have them: the rank whose loss was bad comes first.
    rank = next((r for r, event in bad.items() if _bad_loss(event)), min(bad))
    found, losses = bad[rank]["bad"], _bad_loss(bad[rank])
    kind = "weights" if found["before"] else "gradients"
    names = found["before"] or found["grads"]
    when = " before the step" if found["before"] else " in the step"
    yield step.finding(
        rank,
        f"expected finite {kind}{when}, got NaN or infinity in {len(names)} of "
        f"{len(step.layout(rank))} tensors",
        names[0],
        place=losses[0]["place"] if losses else None,
        likely=_why(losses, bool(found["before"])),
        is_advice=not found["before"] and not found["after"],  # the optimizer left the step out
    )


def _bad_loss(event: Any) -> list[Any]:
    return [each for each in event["losses"] if each["is_bad"] or each["tokens"] == 0]


def _loss_finite(step: Step) -> Iterator[Finding]:
    """A mean over no token: PyTorch gives NaN, with gradients of zero."""
    for rank, event in step.events.items():
        losses = [each for each in event["losses"] if each["is_bad"] and each["tokens"] == 0]
        if losses:
            yield step.finding(
                rank,
                f"expected a finite loss, got NaN or infinity in {len(losses)} of the step's "
                f"{len(event['losses'])} losses",
                place=losses[0]["place"],
                likely=_why(losses, False),
                is_advice=True,
            )
            return


def _why(losses: list[Any], is_old: bool) -> str:
    if is_old:
        return "the weights were made so, or an earlier step has made them so"
    if any(loss["tokens"] == 0 for loss in losses):
        return "all targets of a micro-batch are ignored: the mean over no token is NaN"
    return "the loss is not finite" if losses else ""


@rank_norm("watch.optimizer.moves", source=_FSDP)
def optimizer_moves(step: Step, rank: int, event: Event) -> Finding | None:
    """A step with gradients and a learning rate above zero MUST move the parameters."""
    rates = [lr for lr, _ in event["options"] if lr]
    if event["moved"] or event["skips"] or event["bad"]["grads"] or not rates:
        return None
    none = all(each is None for each in event["grads"])
    if event["computed"] and (none or (event["cleared"] and not any(event["grads"]))):
        return step.finding(
            rank,
            "expected gradients in the step, got none, though a backward computed them",
            likely="they are cleared between backward and step",
        )
    if not any(event["grads"]) or step.number == 1:
        return None
    return step.finding(
        rank,
        "expected the step to change the parameters, got the same bits in all of them",
        likely="the optimizer steps copies, or undoes its update",
    )


@rank_norm("watch.optimizer.update", source="docs.pytorch.org/docs/stable/optim.html")
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


@rank_norm("watch.optimizer.resumed", source="docs.pytorch.org/docs/stable/optim.html")
def optimizer_resumed(step: Step, rank: int, event: Event) -> Finding | None:
    """A step after `load_state_dict` SHOULD have the options of the script and the rate loaded."""
    loaded = event["loaded"] or {"replaced": [], "rates": []}
    rates = [lr for lr, _ in event["options"] if lr is not None]
    jumps = [
        (was, now)
        for was, now in zip(loaded["rates"], rates, strict=False)
        if was and now and not 1 / _JUMP <= now / was <= _JUMP
    ]
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


@rank_norm("watch.schedule.per-update", source="docs.pytorch.org/docs/stable/optim.html")
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
