"""The norms of a step: what holds between the ranks each time they take one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from spec_tests.watch.clipping import clip_norm
from spec_tests.watch.inputs import CHECKS as INPUT_CHECKS
from spec_tests.watch.losses import CHECKS as LOSS_CHECKS
from spec_tests.watch.norm import Finding, norm
from spec_tests.watch.run import Step, unequal
from spec_tests.watch.samples import CHECKS as SAMPLE_CHECKS
from spec_tests.watch.values import (
    numbers_finite,
    optimizer_moves,
    optimizer_precision,
    optimizer_resumed,
    optimizer_update,
    schedule_per_update,
)

_ALONE = "nothing reduces their gradients, so that the ranks train alone: wrap the model in DDP"
_QUIET_STEPS, _FEW = 3, 64  # elements that collectives may carry, such as a loss that is shown
_DDP = "docs.pytorch.org/docs/stable/notes/ddp.html"
_FSDP = "docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"


@norm("watch.optimizer.holds-the-model", source=_FSDP)
def holds_the_model(step: Step) -> Iterator[Finding]:
    """The optimizer MUST hold the parameters that the model trains with."""
    # Where a script shards the optimizer by hand, each parameter is another rank's.
    everywhere = set.intersection(*({*event["loose"][0]} for event in step.events.values()))
    for rank, event in step.events.items():
        loose, stray = event["loose"]
        loose = [name for name in loose if name in everywhere or stray]
        if loose:
            text = (
                f"rank {rank}, {loose[0]!r}: expected an optimizer to hold it, got none that does"
            )
            text += f" ({len(loose)} such parameters have gradients)" if len(loose) > 1 else ""
            if stray:
                text += f", while {len(stray)} parameters of the optimizer belong to no module"
            likely = "the optimizer was built before the model was wrapped, moved or replaced"
            yield Finding(
                "watch.optimizer.holds-the-model",
                text,
                step.number,
                rank,
                loose[0],
                step.place(rank),
                likely if stray else "the parameter was left out of the optimizer's groups",
                is_advice=not stray and any(g is not None for g in event["grads"]),
            )
            return


@norm("watch.reduction.no-sync", source=_DDP)
def nothing_reduced_under_no_sync(step: Step) -> Iterator[Finding]:
    """A gradient MUST NOT be reduced in a micro-batch that `no_sync` is meant to leave out."""
    for rank, event in step.events.items() if step.run.world > 1 else ():
        meant = event["backwards"] - event["unsynced"]
        if not event["unsynced"] or not event["is_complete"] or not event["distinct"]:
            continue
        times = event["reduced"] / event["distinct"]
        if times > meant + 0.5:
            flags = [forward["syncs"] for forward in event["forwards"]]
            outside = sum(flag is True for flag in flags) > meant
            yield Finding(
                "watch.reduction.no-sync",
                f"rank {rank}: expected {meant} all-reduce of the gradients in a window of "
                f"{event['backwards']} micro-batches, got {times:.3g}",
                step.number,
                rank,
                place=event["forwards"][-1]["place"] if event["forwards"] else step.place(rank),
                likely="no_sync encloses the backward alone; DDP decides in the forward" * outside,
            )
            return


@norm("watch.reduction.once", source=_DDP)
def reduced_once(step: Step) -> Iterator[Finding]:
    """Every trainable element MUST be reduced at most once for each backward that computed it."""
    for rank, event in step.events.items():
        layout = step.layout(rank)
        if not event["is_complete"] or not event["computed"] or step.run.world == 1:
            continue
        # Each of several optimizers reduces for all; a rank may reduce what it did not compute.
        if len(step.run.ranks[rank].layouts) > 1 or any(e["kind"] != "ddp" for e in layout):
            continue
        whole = sum(math.prod(e["shape"]) for e in layout if e["is_trained"])
        expected = max(event["computed"], whole * event["backwards"])
        times = event["reduced"] / expected
        if times > 1.9 and event["largest"] <= whole:
            yield Finding(
                "watch.reduction.once",
                f"rank {rank}: expected {expected:,} gradient elements to be reduced, "
                f"got {event['reduced']:,} ({times:.3g} times as many)",
                step.number,
                rank,
                place=step.place(rank),
                likely="the wrapper reduces, and the script reduces the same gradients again",
            )
            return


@norm("watch.reduction.through-the-wrapper", source=_DDP)
def through_the_wrapper(step: Step) -> Iterator[Finding]:
    """A training forward MUST go through DistributedDataParallel, not to the module inside it."""
    for rank, event in step.events.items():
        inside = [forward for forward in event["forwards"] if forward["inside"]]
        through = sum(forward["syncs"] is not None for forward in event["forwards"])
        # As many backwards as forwards of the wrapper: the others were an evaluation.
        if inside and not 0 < event["backwards"] <= through:
            yield Finding(
                "watch.reduction.through-the-wrapper",
                f"rank {rank}: expected a forward of DistributedDataParallel, got one of the "
                f"{inside[0]['root']} inside it ({len(inside)} of {len(event['forwards'])} "
                "forwards)",
                step.number,
                rank,
                place=inside[0]["place"],
                likely="the module that was wrapped is called: its gradients are not prepared for",
            )
            return


@norm("watch.scaler.unscaled", source="docs.pytorch.org/docs/stable/notes/amp_examples.html")
def scaler_unscaled(step: Step) -> Iterator[Finding]:
    """Gradients of a loss that a GradScaler scaled MUST be unscaled before the step."""
    for rank, event in step.events.items():
        if event["scaled"]:
            yield Finding(
                "watch.scaler.unscaled",
                f"rank {rank}: expected unscaled gradients, got a step with those of a scaled loss",
                step.number,
                rank,
                place=step.place(rank),
                likely="optimizer.step() is called; scaler.step(optimizer) unscales",
            )
            return


@norm("watch.reduction.saved", source=_DDP)
def reduction_saved(step: Step) -> Iterator[Finding]:
    """Accumulated gradients SHOULD be reduced once per step, not once per micro-batch."""
    for rank, event in step.events.items() if step.run.world > 1 else ():
        wasted = event["backwards"] > 1 and not event["unsynced"] and event["is_complete"]
        wasted = wasted and not event["dropped"]  # an update that was left out accumulates nothing
        is_ddp = any(entry["kind"] == "ddp" for entry in step.layout(rank))
        flags = [forward["syncs"] for forward in event["forwards"]]
        every = 0.95 * event["backwards"] * event["distinct"]
        if wasted and is_ddp and len(flags) == event["backwards"] and event["reduced"] > every > 0:
            yield Finding(
                "watch.reduction.saved",
                f"rank {rank}: the gradients are reduced in each of {event['backwards']} "
                "micro-batches; no_sync() around all but the last saves the others",
                step.number,
                rank,
                place=event["forwards"][0]["place"],
            )
            return


@norm("watch.weights.current", source=_FSDP)
def weights_current(step: Step) -> Iterator[Finding]:
    """Full weights that a module computes with MUST be the current shards."""
    for rank, event in step.events.items():
        for name, place, number in event["stale"][:1]:
            yield Finding(
                "watch.weights.current",
                f"rank {rank}, {name!r}: expected the weights of the last step, got older ones in "
                f"{number:,} elements of this rank's part ({len(event['stale'])} tensors)",
                step.number,
                rank,
                name,
                place,
                "full weights were kept from a forward before the step, such as an evaluation "
                "between "
                "backward and step",
            )
            return


@norm("watch.parameters.stay-tied", source="Press and Wolf 2017; nanoGPT's model.py")
def stay_tied(step: Step) -> Iterator[Finding]:
    """Parameters that were tied when the model was built MUST still be one parameter."""
    for rank, event in step.events.items():
        for first, second in event["ties"][:1]:
            yield Finding(
                "watch.parameters.stay-tied",
                f"rank {rank}, {first!r} and {second!r}: expected one tied parameter, got two",
                step.number,
                rank,
                first,
                step.place(rank),
                "the model was moved, loaded with assign=True or wrapped in parts after it was "
                "tied",
            )
            return


@norm("watch.gradients.equal", source="Li et al. 2020, section 3.2")
def gradients_equal(step: Step) -> Iterator[Finding]:
    """Gradients of replicated parameters MUST be equal on all ranks when the step begins."""
    wrong = {name for name, _, _ in unequal(step, "after")}
    # By hand, a gradient may be whole on the rank alone that updates the parameter.
    ddp = {name for name, kind, _ in step.replicas("grads") if kind == "ddp"}
    found = [each for each in unequal(step, "grads") if each[0] in wrong | ddp]
    if found:
        name, rank, values = found[0]
        lacks = [r for r, v in values.items() if v is None]
        none = all(e["reduced"] == 0 and e["is_complete"] for e in step.events.values())
        likely = "nothing was reduced in this step" if none else _late_flag(step, rank)
        yield Finding(
            "watch.gradients.equal",
            f"rank {rank}, {name!r}: expected the gradient of rank {min(values)}, got "
            f"{'none' if rank in lacks else 'another one'} ({_several(found, step)})"
            f"{_reduced_ones(step, rank)}",
            step.number,
            rank,
            name,
            step.place(rank),
            step.ask(likely or ("a rank did not use the parameter" if lacks else "")),
            is_advice=bool(step.doubt),
        )


def _reduced_ones(step: Step, rank: int) -> str:
    """Return in words which micro-batches DDP reduced, as it decides in their forwards."""
    flags = [forward["syncs"] for forward in step.events[rank]["forwards"]]
    if len(flags) < 2 or None in flags:
        return ""
    reduced, left = ([at for at, f in enumerate(flags, 1) if f is flag] for flag in (True, False))
    words = f"micro-batches {', '.join(map(str, reduced))}" if reduced else "no micro-batch"
    off = f"; {', '.join(map(str, left))} ran with no_sync or require_backward_grad_sync=False"
    return f"; of {len(flags)}, DDP reduced {words}" + off * bool(left)


def _late_flag(step: Step, rank: int) -> str:
    flags = [forward["syncs"] for forward in step.events[rank]["forwards"]]
    if len(flags) < 2 or flags[-1] is not False:
        return ""
    return "the last micro-batch was not reduced: DDP reads no_sync and the flag in the forward"


@norm("watch.replicas.begin-equal", source="Li et al. 2020, section 3.2")
def replicas_begin_equal(step: Step) -> Iterator[Finding]:
    """Replicated parameters MUST be equal on all ranks before the first step."""
    if step.number == _QUIET_STEPS and step.is_alone:
        yield from _parts_of_one_data_set(step)
    found = list(unequal(step, "before", every=True)) if step.number == 1 else []
    if found:
        step.run.unequal_starts.add(step.optimizer)
        name, rank, values = found[0]
        names = {each[0] for each in found}
        added = _added(step, names)
        reduces = _are_reduced(step, names)
        is_meant = "; right if each rank is to train a model of its own" * step.is_alone
        ask = step.ask(_unwrapped(step, names) or _ALONE + is_meant)
        yield Finding(
            "watch.replicas.begin-equal",
            f"rank {rank}, {name!r}: expected the weights of rank {min(values)} before the first "
            f"step, got others ({_several(found, step)})",
            step.number,
            rank,
            name,
            step.place(rank),
            added or ("the first weights were not broadcast" if reduces else ask),
            is_advice=not (reduces or added or step.run.groups),
        )


def _parts_of_one_data_set(step: Step) -> Iterator[Finding]:
    """Ranks of an ensemble have all data, or data of their own: these divide theirs."""
    splits = [(event["feed"] or {}).get("split") for event in step.events.values()]
    parts = {split["part"] for split in splits if split and split["parts"] == len(splits)}
    is_quiet = all(e["is_complete"] and e["carried"] <= _FEW for e in step.events.values())
    found = list(unequal(step, "after", every=True))
    if len(parts) == len(splits) and is_quiet and found:
        name, rank, values = found[0]
        yield Finding(
            "watch.replicas.begin-equal",
            f"rank {rank}, {name!r}: expected the weights of rank {min(values)}, since a "
            "DistributedSampler divides one data set among the ranks, got weights of its own from "
            f"the start, and no gradient that was exchanged in {step.number} steps "
            f"({_several(found, step)})",
            step.number,
            rank,
            name,
            step.place(rank),
            _ALONE,
        )


def _unwrapped(step: Step, names: set[str]) -> str:
    """Return in words that one of the models of an optimizer has no wrapper, but another has."""
    kinds = [(entry["kind"], entry["name"]) for entry in step.layout(min(step.events))]
    wrapped = sum(kind == "ddp" for kind, _ in kinds)
    if not wrapped or any(name in names for kind, name in kinds if kind == "ddp"):
        return ""
    return f"its model is not wrapped, while that of {wrapped} other parameters of the optimizer is"


def _added(step: Step, names: set[str]) -> str:
    """Return in words that trained parameters were added to a model that was wrapped before."""
    for event in step.events.values() if not step.doubt and not step.run.has_all_to_all else ():
        pairs = zip(event["layout"], event["grads"], strict=True)
        if any(e["is_added"] and e["name"] in names and grad is not None for e, grad in pairs):
            return (
                "the parameter was added after the model was wrapped, whose wrapper neither "
                "broadcasts nor reduces it"
            )
    return ""


def _are_reduced(step: Step, names: set[str]) -> bool:
    """Return whether ranks reduce the gradients of some parameters: then these are replicas."""
    if not any(e["reduced"] >= e["distinct"] > 0 for e in step.events.values()):
        return False
    grads = [(kind, [*of.values()]) for n, kind, of in step.replicas("grads") if n in names]
    return any(kind != "plain" or (of[0] and of == of[:1] * len(of)) for kind, of in grads)


@norm("watch.replicas.equal", source="Li et al. 2020, section 3.2")
def replicas_equal(step: Step) -> Iterator[Finding]:
    """Replicated parameters MUST be equal on all ranks after an optimizer step."""
    found = list(unequal(step, "after"))
    if found:
        name, rank, values = found[0]
        yield Finding(
            "watch.replicas.equal",
            f"rank {rank}, {name!r}: expected the weights of rank {min(values)} after the step, "
            f"got others ({_several(found, step)})",
            step.number,
            rank,
            name,
            step.place(rank),
            step.ask(_loaded_on_some(step)),
            is_advice=bool(step.doubt),
        )


def _loaded_on_some(step: Step) -> str:
    """Return in words that some ranks alone have loaded a state for the optimizer."""
    loaded = {bool(event["loaded"]): rank for rank, event in reversed(step.events.items())}
    if len(loaded) < 2:
        return ""
    return f"rank {loaded[True]} loaded a state for its optimizer, rank {loaded[False]} did not"


@norm("watch.replicas.unheld", source="Tarvainen and Valpola 2017, section 2")
def unheld_equal(step: Step) -> Iterator[Finding]:
    """Parameters that no optimizer holds, as of a teacher, MUST stay equal if they begin equal."""
    if list(unequal(step, "after")) or step.optimizer in step.run.unequal_starts:
        return  # what they are averages of differs
    for peers in step.peers():
        events = {rank: step.events[rank]["unheld"] for rank in peers}
        for kind in set.intersection(*({*each} for each in events.values())):
            first, *rest = (events[rank][kind] for rank in peers)
            pairs = zip(peers[1:], rest, strict=True)
            wrong = next((r for r, o in pairs if o != first and len(o) == len(first)), None)
            if step.run.unheld.setdefault((peers[0], kind), wrong is None) and wrong is not None:
                yield Finding(
                    "watch.replicas.unheld",
                    f"rank {wrong}: expected the parameters of a {kind} that no optimizer holds to "
                    f"be those of rank {peers[0]} still, got others",
                    step.number,
                    wrong,
                    place=step.place(wrong),
                    likely=step.ask(
                        "a moving average, or frozen weights, are changed on some ranks alone"
                    ),
                    is_advice=bool(step.doubt),
                )
                return


def _several(found: Sequence[Any], step: Step) -> str:
    return f"{len(found)} of {len(step.layout(min(step.events)))} parameters"


@norm("watch.optimizer.same-options", source=_DDP)
def same_options(step: Step) -> Iterator[Finding]:
    """Learning rate and weight decay MUST be equal on all ranks."""
    first, *others = step.events
    for rank in others if not step.is_alone else ():
        pairs = zip(step.events[first]["options"], step.events[rank]["options"], strict=False)
        for group, (theirs, ours) in enumerate(pairs):
            for name, wanted, got in zip(("lr", "weight_decay"), theirs, ours, strict=True):
                if wanted != got:
                    yield Finding(
                        "watch.optimizer.same-options",
                        f"rank {rank}: expected {name} {wanted:g} of rank {first} in group "
                        f"{group}, "
                        f"got {got:g}",
                        step.number,
                        rank,
                        place=step.place(rank),
                        is_advice=bool(step.doubt),
                    )
                    return


CHECKS = (
    numbers_finite,
    *SAMPLE_CHECKS,
    *INPUT_CHECKS,
    *LOSS_CHECKS,
    holds_the_model,
    nothing_reduced_under_no_sync,
    reduced_once,
    through_the_wrapper,
    scaler_unscaled,
    optimizer_precision,
    reduction_saved,
    weights_current,
    stay_tied,
    replicas_begin_equal,
    gradients_equal,
    replicas_equal,
    unheld_equal,
    clip_norm,
    same_options,
    optimizer_moves,
    optimizer_resumed,
    optimizer_update,
    schedule_per_update,
)
"""Those that are asked of each step; causes come before effects."""
