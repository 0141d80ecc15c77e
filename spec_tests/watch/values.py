"""The norms of the numbers of a step: finite, moved by it, not lost to rounding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spec_tests.watch.norm import Finding, norm
from spec_tests.watch.run import Step

_JUMP = 5.0  # a schedule changes the rate by less from one step to the next
_FSDP = "docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"


@norm("watch.numbers.finite", source="docs.pytorch.org/docs/stable/notes/numerical_accuracy.html")
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
    yield Finding(
        "watch.numbers.finite",
        f"rank {rank}, {names[0]!r}: expected finite {kind}{when}, got NaN or infinity in "
        f"{len(names)} of {len(step.layout(rank))} tensors",
        step.number,
        rank,
        names[0],
        losses[0]["place"] if losses else step.place(rank),
        _why(losses, bool(found["before"])),
        is_advice=not found["before"] and not found["after"],  # the optimizer left the step out
    )


def _bad_loss(event: Any) -> list[Any]:
    return [each for each in event["losses"] if each["is_bad"] or each["tokens"] == 0]


def _loss_finite(step: Step) -> Iterator[Finding]:
    """A mean over no token: PyTorch gives NaN, with gradients of zero."""
    for rank, event in step.events.items():
        losses = [each for each in event["losses"] if each["is_bad"] and each["tokens"] == 0]
        if losses:
            yield Finding(
                "watch.numbers.finite",
                f"rank {rank}: expected a finite loss, got NaN or infinity in {len(losses)} of the "
                f"step's {len(event['losses'])} losses",
                step.number,
                rank,
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


@norm("watch.optimizer.moves", source=_FSDP)
def optimizer_moves(step: Step) -> Iterator[Finding]:
    """A step with gradients and a learning rate above zero MUST move the parameters."""
    for rank, event in step.events.items():
        rates = [lr for lr, _ in event["options"] if lr]
        if event["moved"] or event["skips"] or event["bad"]["grads"] or not rates:
            continue
        none = all(each is None for each in event["grads"])
        if event["computed"] and (none or (event["cleared"] and not any(event["grads"]))):
            yield Finding(
                "watch.optimizer.moves",
                f"rank {rank}: expected gradients in the step, got none, though a backward "
                "computed them",
                step.number,
                rank,
                place=step.place(rank),
                likely="they are cleared between backward and step",
            )
            return
        if any(event["grads"]) and step.number > 1:
            yield Finding(
                "watch.optimizer.moves",
                f"rank {rank}: expected the step to change the parameters, got the same bits in "
                "all of them",
                step.number,
                rank,
                place=step.place(rank),
                likely="the optimizer steps copies, or undoes its update",
            )
            return


@norm("watch.optimizer.update", source="docs.pytorch.org/docs/stable/optim.html")
def optimizer_update(step: Step) -> Iterator[Finding]:
    """A step MUST change each parameter, or this rank's shard of it, by the optimizer's update."""
    for rank, event in step.events.items():
        if event["update"] and not event["skips"] and not event["bad"]["grads"]:
            name, off, of = event["update"]
            yield Finding(
                "watch.optimizer.update",
                f"rank {rank}, {name!r}: expected what {event['title']} makes of it, its gradient "
                f"and its state, got something else in {off:,} of {of:,} elements",
                step.number,
                rank,
                name,
                step.place(rank),
                "it shares memory with another parameter, or is written over in the step",
            )
            return


@norm("watch.optimizer.precision", source="Micikevicius et al. 2018, section 3.1")
def optimizer_precision(step: Step) -> Iterator[Finding]:
    """Parameters of 16 bits SHOULD not lose the optimizer's updates to rounding."""
    for rank, event in step.events.items():
        name, share = event["half"] or ("", 1.0)
        if share < 0.9 and any(event["grads"]):
            yield Finding(
                "watch.optimizer.precision",
                f"rank {rank}, {name!r}: the step changed {100 * share:.0f} % of its elements; in "
                "the others the update is smaller than half a unit in the last place",
                step.number,
                rank,
                name,
                step.place(rank),
                "keep the optimizer's parameters in float32, and compute in 16 bits",
            )
            return


@norm("watch.optimizer.resumed", source="docs.pytorch.org/docs/stable/optim.html")
def optimizer_resumed(step: Step) -> Iterator[Finding]:
    """A step after `load_state_dict` SHOULD have the options of the script and the rate loaded."""
    for rank, event in step.events.items():
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
            continue
        place = loaded["place"]
        yield Finding(
            "watch.optimizer.resumed", f"rank {rank}: {words}", step.number, rank, "", place, likely
        )
        return


@norm("watch.schedule.per-update", source="docs.pytorch.org/docs/stable/optim.html")
def schedule_per_update(step: Step) -> Iterator[Finding]:
    """A learning-rate schedule SHOULD be stepped once per update, not once per micro-batch."""
    for rank, event in step.events.items():
        micro = event["backwards"] or len(event["forwards"])
        times, place = event["scheduled"] or (0, "")
        if step.number > 1 and times == micro > 1:
            yield Finding(
                "watch.schedule.per-update",
                f"rank {rank}: expected one step of the schedule for an update, got {times}, as "
                "many as micro-batches",
                step.number,
                rank,
                place=place,
                likely="scheduler.step() is called for each micro-batch; right if the schedule's "
                "length counts these",
            )
            return
