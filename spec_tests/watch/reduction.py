"""The norms of gradients and weights between ranks: reduced once, through the wrapper, equal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from spec_tests.watch.norm import About, Finding, rank_norm, step_norm
from spec_tests.watch.run import Event, Step

_DDP = "docs.pytorch.org/docs/stable/notes/ddp.html"
_LI = "Li et al. 2020, section 3.2"
_FSDP = "docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"


@rank_norm("watch.optimizer.holds-the-model", source=_FSDP)
def holds_the_model(step: Step, rank: int, event: Event) -> Finding | None:
    """The optimizer MUST hold the parameters that the model trains with."""
    loose, stray, idle, unreduced = event["loose"]
    if unreduced:
        grads = list(zip(step.layout(rank), event["grads"], strict=True))
        # The optimizer leaves out parameters without a gradient: a unit may skip whole updates.
        is_advice = any(grad is not None for _, grad in grads)
        is_advice = is_advice and all(g is None for e, g in grads if e["name"] in unreduced)
        likely = "set_requires_gradient_sync(False) is in force in the update's last micro-batch"
        return step.finding(
            rank,
            "expected FSDP2 to reduce its gradient before the step, got one that is accumulated on "
            f"this rank and not reduced ({len(unreduced)} parameters)",
            unreduced[0],
            likely=likely + "; right if it is to be updated less often" * is_advice,
            is_advice=is_advice,
        )
    # Where a script shards the optimizer by hand, each parameter is another rank's.
    everywhere = set.intersection(*({*each["loose"][0]} for each in step.events.values()))
    loose = [name for name in loose if name in everywhere or stray]
    if not loose or _are_copied(step, rank, event):
        return None
    text = "expected an optimizer to hold it, got none that does"
    text += f" ({len(loose)} such parameters have gradients)" if len(loose) > 1 else ""
    likely = "the parameter was left out of the optimizer's groups"
    if stray:
        text += f", while {len(stray)} parameters of the optimizer belong to no module"
        likely = "the optimizer was built before the model was wrapped, moved or replaced"
    if loose[0] in idle:
        text = text.replace("got none that does", "got one that has not stepped for long")
        likely = "its optimizer is never stepped, or another one has taken its place; right if it "
        likely += "is to step later"
    is_advice = not stray and any(g is not None for g in event["grads"])
    is_advice = is_advice or loose[0] in idle
    return step.finding(rank, text, loose[0], likely=likely, is_advice=is_advice)


def _are_copied(step: Step, rank: int, event: Event) -> bool:
    """Return whether an optimizer steps copies of the model's parameters, or a shard of them."""
    sizes = {True: 0, False: 0}
    for entry, grad in zip(step.layout(rank), event["grads"], strict=True):
        sizes[entry["is_held"]] += 0 if grad is None else math.prod(entry["shape"])
    return 0 < sizes[False] * step.run.world >= event["distinct"] - sizes[True]


@rank_norm("watch.reduction.no-sync", source=_DDP)
def nothing_reduced_under_no_sync(step: Step, rank: int, event: Event) -> Finding | None:
    """A gradient MUST NOT be reduced in a micro-batch that `no_sync` is meant to leave out."""
    meant = event["backwards"] - event["unsynced"]
    is_known = event["unsynced"] and event["is_complete"] and event["distinct"]
    if step.run.world == 1 or not is_known:
        return None
    # DDP reduces what a micro-batch did not use as well, and a second model may use none of them.
    most = max(meant, event["synced"] / event["distinct"])
    times = (event["reduced"] + sum(event["others"]) - event["by_hand"]) / event["distinct"]
    if times <= most + 0.5 or not (event["synced"] or any(f["syncs"] for f in event["forwards"])):
        return None
    outside = sum(forward["syncs"] is True for forward in event["forwards"]) > meant
    return step.finding(
        rank,
        f"expected {most:.3g} all-reduce of the gradients in a window of {event['backwards']} "
        f"micro-batches, got {times:.3g}",
        place=event["forwards"][-1]["place"] if event["forwards"] else None,
        likely="no_sync encloses the backward alone; DDP decides in the forward" * outside,
    )


@rank_norm("watch.reduction.once", source=_DDP)
def reduced_once(step: Step, rank: int, event: Event) -> Finding | None:
    """Every trainable element MUST be reduced at most once for each backward that computed it."""
    layout = step.layout(rank)
    if not event["is_complete"] or not event["computed"] or step.run.world == 1:
        return None
    # Each of several optimizers reduces for all; a rank may reduce what it did not compute.
    if len(step.run.ranks[rank].layouts) > 1 or any(e["kind"] != "ddp" for e in layout):
        return None
    whole = sum(math.prod(e["shape"]) for e in layout if e["is_trained"])
    expected = max(event["computed"], whole * event["backwards"])
    times = event["reduced"] / expected
    if times <= 1.9 or event["largest"] > whole:
        return None
    return step.finding(
        rank,
        f"expected {expected:,} gradient elements to be reduced, got {event['reduced']:,} "
        f"({times:.3g} times as many)",
        likely="the wrapper reduces, and the script reduces the same gradients again",
    )


@rank_norm("watch.reduction.through-the-wrapper", source=_DDP, about=About.EQUAL)
def through_the_wrapper(step: Step, rank: int, event: Event) -> Finding | None:
    """A training forward MUST go through DistributedDataParallel, not to the module inside it."""
    inside = [forward for forward in event["forwards"] if forward["inside"]]
    through = sum(forward["syncs"] is not None for forward in event["forwards"])
    is_by_hand = step.run.world > 1 and not any(step.unequal("grads", every=True))
    # As many backwards as forwards of the wrapper: the others were an evaluation.
    if not inside or is_by_hand or 0 < event["backwards"] <= through:
        return None
    return step.finding(
        rank,
        f"expected a forward of DistributedDataParallel, got one of the {inside[0]['root']} "
        f"inside it ({len(inside)} of {len(event['forwards'])} forwards)",
        place=inside[0]["place"],
        likely="the module that was wrapped is called: its gradients are not prepared for",
    )


@rank_norm("watch.scaler.unscaled", source="docs.pytorch.org/docs/stable/notes/amp_examples.html")
def scaler_unscaled(step: Step, rank: int, event: Event) -> Finding | None:
    """Gradients of a loss that a GradScaler scaled MUST be unscaled before the step."""
    if not event["scaled"]:
        return None
    return step.finding(
        rank,
        "expected unscaled gradients, got a step with those of a scaled loss",
        likely="optimizer.step() is called; scaler.step(optimizer) unscales",
    )


@rank_norm("watch.reduction.saved", source=_DDP)
def reduction_saved(step: Step, rank: int, event: Event) -> Finding | None:
    """Accumulated gradients SHOULD be reduced once per step, not once per micro-batch."""
    wasted = event["backwards"] > 1 and not event["unsynced"] and event["is_complete"]
    wasted = wasted and not event["dropped"]  # an update that was left out accumulates nothing
    is_ddp = any(entry["kind"] == "ddp" for entry in step.layout(rank)) and step.run.world > 1
    every = 0.95 * event["backwards"] * event["distinct"]
    is_whole = len(event["forwards"]) == event["backwards"] and event["reduced"] > every > 0
    if not (wasted and is_ddp and is_whole):
        return None
    return step.finding(
        rank,
        f"the gradients are reduced in each of {event['backwards']} micro-batches; no_sync() "
        "around all but the last saves the others",
        place=event["forwards"][0]["place"],
    )


@rank_norm("watch.weights.current", source=_FSDP)
def weights_current(step: Step, rank: int, event: Event) -> Finding | None:
    """Full weights that a module computes with MUST be the current shards."""
    stale = [each for each in event["stale"] if each[2]]
    if not stale:
        return None
    name, place, number = stale[0]
    return step.finding(
        rank,
        f"expected the weights of the last step, got older ones in {number:,} elements of this "
        f"rank's part ({len(stale)} tensors)",
        name,
        place=place,
        likely="full weights were kept from a forward before the step, such as an evaluation "
        "between backward and step",
    )


@rank_norm("watch.parameters.stay-tied", source="Press and Wolf 2017; nanoGPT's model.py")
def stay_tied(step: Step, rank: int, event: Event) -> Finding | None:
    """Parameters that were tied when the model was built MUST still be one parameter."""
    if not event["ties"]:
        return None
    first, second = event["ties"][0]
    text = f"rank {rank}, {first!r} and {second!r}: expected one tied parameter, got two"
    likely = "the model was moved, loaded with assign=True or wrapped in parts after it was tied"
    return Finding("", text, step.number, rank, first, step.place(rank), likely)


@step_norm("watch.gradients.equal", source=_LI, about=About.EQUAL)
def gradients_equal(step: Step) -> Iterator[Finding]:
    """Gradients of replicated parameters MUST be equal on all ranks when the step begins."""
    wrong = {name for name, _, _ in step.unequal("after")}
    # By hand, a gradient may be whole on the rank alone that updates the parameter.
    ddp = {name for name, kind, _ in step.replicas("grads") if kind == "ddp"}
    found = [each for each in step.unequal("grads") if each[0] in wrong | ddp]
    if not found:
        return
    name, rank, values = _first(found)
    are_reduced = [*next(of.values() for n, _, of in step.replicas("reduces") if n == name)]
    are_reduced += [f["syncs"] is not None for e in step.events.values() for f in e["forwards"]]
    lacks = [r for r, v in values.items() if v is None]
    micro_batches, likely = _reduced_ones(step, rank)
    place = step.events[rank]["forwards"][-1]["place"] if likely else None
    if all(e["reduced"] == 0 and e["is_complete"] for e in step.events.values()) and not likely:
        likely = "nothing was reduced in this step"
    if lacks and not likely:
        likely = f"rank {lacks[0]} did not use the parameter"
    likely = likely or step.unwrapped(name)
    gone = [r for r in values if step.events[r]["joined"]]
    if gone:
        likely = f"rank {gone[0]} has no inputs left in a Join: its optimizer steps without the "
        likely += "others' gradients"
    wanted = "no gradient, as on" if min(values) in lacks else "the gradient of"
    got = "none" if rank in lacks else "one" if min(values) in lacks else "another one"
    yield step.finding(
        rank,
        f"expected {wanted} rank {min(values)}, got {got} ({_several(found, step)}){micro_batches}",
        name,
        place=place,
        likely=likely,
        is_advice=bool(gone),
        is_certain=name in ddp and all(are_reduced),
    )


def _reduced_ones(step: Step, rank: int) -> tuple[str, str]:
    """Return which micro-batches DDP reduced, as it decides in their forwards, and what is likely.

    Both are in words. The first is "" where a forward has no wrapper that decides, the second
    where the last one was reduced or has none.
    """
    flags = [forward["syncs"] for forward in step.events[rank]["forwards"]]
    likely = "the last micro-batch was not reduced: DDP reads no_sync and the flag in the forward"
    likely *= flags[-1:] == [False]
    if len(flags) < 2 or None in flags:
        return "", likely
    reduced, left = ([at for at, f in enumerate(flags, 1) if f is flag] for flag in (True, False))
    words = f"micro-batches {', '.join(map(str, reduced))}" if reduced else "no micro-batch"
    off = f"; {', '.join(map(str, left))} ran with no_sync or require_backward_grad_sync=False"
    return f"; of {len(flags)}, DDP reduced {words}{off * bool(left)}", likely


@step_norm("watch.replicas.begin-equal", source=_LI, about=About.BEGIN)
def replicas_begin_equal(step: Step) -> Iterator[Finding]:
    """Replicated parameters MUST be equal on all ranks before the first step."""
    found = list(step.unequal("before", every=True)) if step.number == 1 else []
    entries = step.entries
    is_held = any(entries[name]["is_held"] for name, *_ in found)
    if not found or not (is_held or step.run.regimes.seen[step.whose].is_reduced):
        return  # nothing, or no module's, such as a shard that this rank updates
    name, rank, values = _first(sorted(found, key=lambda each: not entries[each[0]]["is_added"]))
    likely = step.unwrapped(name) or "the first weights were not broadcast"
    yield step.finding(
        rank,
        f"expected the weights of rank {min(values)} before the first step, got others "
        f"({_several(found, step)})",
        name,
        likely=likely,
    )


@step_norm("watch.replicas.equal", source=_LI, about=About.EQUAL)
def replicas_equal(step: Step) -> Iterator[Finding]:
    """Replicated parameters MUST be equal on all ranks after an optimizer step."""
    found = list(step.unequal("after"))
    if not found:
        return
    loaded = {bool(event["loaded"]): rank for rank, event in reversed(step.events.items())}
    words = "rank {} loaded a state for its optimizer, rank {} did not"
    name, rank, values = _first(found)
    yield step.finding(
        rank,
        f"expected the weights of rank {min(values)} after the step, got others "
        f"({_several(found, step)})",
        name,
        likely=words.format(loaded[True], loaded[False]) if len(loaded) == 2 else "",
    )


@step_norm(
    "watch.replicas.unheld", source="Tarvainen and Valpola 2017, section 2", about=About.EQUAL
)
def unheld_equal(step: Step) -> Iterator[Finding]:
    """Parameters that no optimizer holds, as of a teacher, MUST stay equal if they begin equal."""
    is_local = any(e["kind"] == "local" for rank in step.events for e in step.layout(rank))
    if is_local or any(step.unequal("after", every=True)):
        return  # what they are averages of differs
    for peers in step.peers():
        events = {rank: step.events[rank]["unheld"] for rank in peers}
        for kind in set.intersection(*({*each} for each in events.values())):
            first = events[peers[0]][kind]
            others = ((rank, of[kind]) for rank, of in events.items())
            wrong = next((r for r, o in others if o != first and len(o) == len(first)), None)
            if step.run.unheld.setdefault((peers[0], kind), wrong is None) and wrong is not None:
                yield step.finding(
                    wrong,
                    f"expected the parameters of a {kind} that no optimizer holds to be those of "
                    f"rank {peers[0]} still, got others",
                    likely="a moving average, or frozen weights, are changed on some ranks alone",
                )


def _first(found: Sequence[tuple[str, str, dict[int, Any]]]) -> tuple[str, int, dict[int, Any]]:
    """Return the first tensor that differs, the first rank that does, and the values of all.

    One of a wrapper comes first: what it promises, no regime doubts.
    """
    name, _, values = min(found, key=lambda each: each[1] == "plain")
    return name, next(r for r, v in values.items() if v != values[min(values)]), values


def _several(found: Sequence[Any], step: Step) -> str:
    return f"{len({each[0] for each in found})} of {len(step.entries)} parameters"


@step_norm("watch.optimizer.same-options", source=_DDP, about=About.EQUAL)
def same_options(step: Step) -> Iterator[Finding]:
    """Learning rate and weight decay MUST be equal on all ranks."""
    first, *others = step.events
    for rank in others:
        pairs = zip(step.events[first]["options"], step.events[rank]["options"], strict=False)
        for group, (theirs, ours) in enumerate(pairs):
            for name, wanted, got in zip(("lr", "weight_decay"), theirs, ours, strict=True):
                if wanted != got:
                    yield step.finding(
                        rank,
                        f"expected {name} {wanted:g} of rank {first} in group {group}, got {got:g}",
                    )
