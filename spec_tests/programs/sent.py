"""What a call sends and which parameters it leaves full, and what it may: an observer of calls.

Values do not show who reduces in `no_sync`, gathers what is there, sends frozen gradients or sends
wide. The bounds are upper ones. An implementation may gather ahead, or send less. Nor do they show
a unit that stays open after its backward, a `reshard` that does nothing, or a gather that a later
wait brings back. What a call leaves open (a pass that an exception ended, a setting that keeps
weights) is not judged until a later call settles it.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from spec_tests.programs.alone import SEED, shape_of
from spec_tests.programs.calls import VERBS, Call, Program, after, spelled
from spec_tests.programs.faults import FAULTS
from spec_tests.programs.laws import traffic
from spec_tests.programs.on_ranks import OnRank
from spec_tests.programs.pieces import Seen
from spec_tests.programs.scene import REPLICAS, SHARDS, STEPPED, Scene
from spec_tests.programs.units import lists_of, parameters_of_units
from spec_tests.rig import judge
from spec_tests.rig.judge.oracle import parameters
from spec_tests.rig.ranks.recorder import Log
from spec_tests.rig.toys import TOYS

WITHIN = {
    "directly": "hooks send whether or not the wrapper's forward came before",
    "accumulate": FAULTS["reduced-in-no-sync"].means,
    "aside": "an evaluation switches synchronisation on, in place of leaving it as it was",
    "nested": "the inner exit switches synchronisation on, in place of restoring what was before",
}
"""Calls that replicas do by themselves, and why one sends all the same."""
CALLED = {"reused": 2, "tied": 2, "reordered": 2}
"""How often a forward of a toy may call a layer."""
FLAG = 4
"""Bytes that may be sent beside each parameter, for each rank: whether it was used."""

SMALL = 512
"""Bytes: an output in float64, and what torch keeps by itself. Most toys have more weights."""


_WAITS = 20
"""Looks at memory that grew, a twentieth of a second apart."""


@dataclass
class Sent:
    """What each call of a program sends on a rank."""

    rank: OnRank
    calls: list[dict[str, Any]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def watching(self, name: str) -> Iterator[None]:
        """Record one call."""
        if name == "infer":  # in inference mode torch keeps tensors that a dispatch mode has seen
            yield
            self.calls.append(self._state())
            return
        weighed = self.rank.ctx.owns_process and is_weighed(self.rank.scene, name, self.names)
        self.names.append(name)
        before = held_bytes(()) if weighed else 0
        with self.rank.ctx.recording() as recorder:
            yield
        grown = {"grown": growth(before) if weighed else 0}
        counts = counted(recorder.log(), self.rank.ctx.world_size)
        self.calls.append(counts | grown | self._state())

    def _state(self) -> dict[str, Any]:
        return {"full": full_names(self.rank.module), "records": self.rank.records}


def counted(log: Log, size: int) -> dict[str, Any]:
    """Return bytes gathered and reduced, the number of gathers, and what is sent beside them.

    "issued" counts what another thread has sent.
    """
    rest = traffic.without_gathers(log).collectives()
    return {
        "bytes gathered": traffic.gathered(log, size, traffic.in_bytes),
        "bytes reduced": traffic.in_bytes(log, *traffic.REDUCTIONS),
        "gathers": traffic.messages(log, size, *traffic.GATHERS),
        "besides": [str(event) for event in rest],
        "issued": log.issued,
    }


def due(scene: Scene, subject: str, size: int, rank: int, frozen: frozenset[int]) -> dict[str, int]:
    """Return how many bytes one copy of the weights, and of the trained gradients, has on the wire.

    Over copies of the weights what was reduced over shards is reduced once more. "in a replica" is
    what is reduced before.
    """
    peers = scene.peers(size, rank)
    copies, shards = (len(peers), 1) if subject in REPLICAS else shape_of(scene, len(peers))
    policy = scene["precision"]
    found = {"weights": 0, "gradients": 0, "in a replica": 0}
    for number, value in enumerate(parameters(scene["toy"][0], SEED).values()):
        if number in scene["ignored"]:
            continue
        weights = policy.get("param_dtype") or scene.weights or value.dtype
        reduced = policy.get("reduce_dtype", weights)
        rows = max(1, value.shape[0] if value.dim() else 1)
        padded = -(-rows // shards) * shards * (value.numel() // rows)
        slack = FLAG * len(peers)
        if shards > 1:
            found["weights"] += padded * weights.itemsize + slack
        if number not in frozen and len(peers) > 1:
            over = (shards > 1) + bool(copies > 1 or scene["mesh"]) / shards
            found["gradients"] += int(padded * over * reduced.itemsize) + slack
            found["in a replica"] += (shards > 1) * padded * reduced.itemsize + slack
    return found


def _is_alone(rank: int, scene: Scene) -> bool:
    """Whether a rank has no peers: it may send to itself, or not."""
    return [rank] in (scene["group"] or ())


def judge_calls(
    ranks: Sequence[Sequence[dict[str, Any]]],
    subject: str,
    scene: Scene,
    program: Program,
    *,
    amounts: bool,
) -> None:
    """No call may send more than the contract lets it.

    Without `amounts` only calls that must reduce nothing are judged for what they reduce.
    """
    __tracebackhide__ = True
    size = len(ranks)
    toy = scene.word("toy")
    for number, call in enumerate(program):
        state = after(program[:number], scene, subject, size)
        if state is None or state.may_refuse:
            return  # after an exception what was sent is settled some time
        if any(earlier[0] == "early" for earlier in program[:number]):
            return  # what it sends may go on in any later call
        for rank, calls in enumerate(ranks):
            seen, what = calls[number], f"rank {rank}, {' '.join(call)!r}"
            _judge_left(seen, call[0], what)
            if "gathers" in seen and not _is_alone(rank, scene):
                one = due(scene, subject, size, rank, state.frozen)
                copy = one["in a replica" if call[0] == "partly" else "gradients"]
                copy = copy if amounts else sys.maxsize
                _judge_reduced(seen, copy, call[0], what, subject, toy)
                most = most_gathered(program[:number], call, scene, one["weights"])
                judge.holds(
                    most is None or seen["bytes gathered"] <= most,
                    f"{what}: expected at most {most} bytes to be gathered after "
                    f"{spelled(program[:number])!r}, got {seen['bytes gathered']}",
                    likely="full weights were freed that a setting or a call keeps",
                )


def _judge_left(seen: dict[str, Any], name: str, what: str) -> None:
    """An evaluation may leave no graph, and a second model that is dropped no memory."""
    __tracebackhide__ = True
    judge.holds(
        not seen["records"],
        f"{what}: expected an output without a graph, got one",
        likely="gradients are switched on, whatever the caller has switched off",
    )
    judge.holds(
        name != "another_lives" or seen.get("grown", 0) <= SMALL,
        f"{what} once more: expected no more memory than before it, got {seen.get('grown')} bytes "
        "more",
        likely="a model that was dropped is kept by what was wrapped around it",
    )


def _judge_reduced(
    sent: dict[str, Any], copy: int, name: str, what: str, subject: str, toy: str
) -> None:
    __tracebackhide__ = True
    verb = VERBS[name]
    if not verb.sends or (subject in REPLICAS and name in WITHIN):
        said, likely = list(sent["besides"]), WITHIN.get(name, "")
        if subject in REPLICAS and sent["bytes gathered"]:
            said.insert(0, f"{sent['bytes gathered']} bytes of buffers")
            likely = "buffers are sent in every training forward"
        if subject in REPLICAS and sent["issued"]:
            said.append(f"{sent['issued']} operations, counted by the groups")
        judge.holds(
            not said, f"{what}: expected nothing to be sent, got {', '.join(said)}", likely=likely
        )
    allowed = copy * (verb.reduces or 0) * CALLED.get(toy, 1)
    judge.holds(
        verb.reduces is None or sent["bytes reduced"] <= allowed,
        f"{what}: expected at most {allowed} bytes of gradients to be reduced, got "
        f"{sent['bytes reduced']}",
        likely="gradients that are frozen, wide, or not to be reduced yet are sent",
    )


def most_gathered(before: Program, call: Call, scene: Scene, copy: int) -> int | None:
    """Return how many bytes a call may gather; None where it is not known what is there.

    Args:
        copy: bytes of the full weights on the wire.
    """
    name, last = call[0], before[-1:]
    once = scene.word("toy") not in CALLED  # else a layer may be freed between two calls
    if last == (("unshard", "now"),) and (name == "unshard" or (name == "evaluate" and once)):
        return 0
    if last == (("reshard",),) and name == "wait":
        return 0
    if scene.word("toy") not in STEPPED or not _is_kept(before, scene):
        return None
    if name == "another_lives":  # which gathers its own
        return None
    if name in ("evaluate", "infer") or scene.is_held:
        return 0
    return copy * (VERBS[name].reduces or 1)  # what a forward frees its backward gathers


def _is_kept(program: Program, scene: Scene) -> bool:
    """Whether the last backward kept the full weights of every unit, and nothing changed since."""
    is_set = is_kept = False
    for call in program:
        if call[0] == "keep":
            is_set, is_kept = call[1] == "True", False
        elif VERBS[call[0]].ends == "backward":
            is_kept = is_set
        elif VERBS[call[0]].ends == "forward":
            is_kept = is_kept and scene.is_held
        else:
            is_kept = is_kept and call[0] in ("zero_grad", "save", "finish")
    return is_kept


def judge_step(
    ranks: Sequence[dict[str, Any]], subject: str, scene: Scene, frozen: frozenset[int]
) -> None:
    """An ordinary step may gather two copies of the weights, and reduce one of the gradients."""
    __tracebackhide__ = True
    times = 1 if scene.is_held and scene.word("hints") == "unhinted" else 2
    module = TOYS[scene["toy"][0]].build(0)
    dtypes = {p.dtype for p in module.parameters()}  # of a unit each may be a message
    units = len(dtypes) * (1 + len(lists_of(module, scene.word("units"))))
    for rank, sent in enumerate(ranks):
        if _is_alone(rank, scene):
            continue
        one = due(scene, subject, len(ranks), rank, frozen)
        bounds = {"bytes reduced": one["gradients"]}
        if subject in SHARDS:  # of a whole model weights are read by gathers
            bounds |= {"bytes gathered": times * one["weights"], "gathers": times * units}
        for kind, most in bounds.items():
            judge.holds(
                sent[kind] <= most * CALLED.get(scene.word("toy"), 1),
                f"rank {rank}, an ordinary step: expected at most {most} {kind}, got {sent[kind]}",
                likely="something is gathered or reduced twice, one by one, or in a wide dtype",
            )


def is_weighed(scene: Scene, name: str, before: Sequence[str]) -> bool:
    """Whether what a call leaves in memory is measured.

    Of forwards only an evaluation has to free all full weights: after another one the first gather
    of its backward may be under way. The first other model may leave what a second one then uses.
    """
    if name == "another_lives":
        return name in before
    return name == "evaluate" and scene.word("reshard") == "freed"


def full_names(module: nn.Module) -> list[str]:
    """Return the names of the parameters that are whole plain tensors with memory."""
    return [
        name
        for name, p in module.named_parameters()
        if not hasattr(p, "placements") and p.numel() and p.untyped_storage().nbytes()
    ]


def held_bytes(but: Seen) -> int:
    """Return the bytes of all storages that a tensor of Python's refers to, in this process."""
    gc.collect()
    shown = [t for _, found in but for t in found.values() if t is not None]
    ours = {id(getattr(tensor, "local", tensor)) for tensor in shown}
    storages = {}
    for thing in gc.get_objects():
        is_tensor = issubclass(type(thing), torch.Tensor) and id(thing) not in ours
        if is_tensor and not hasattr(thing, "placements"):  # whose local tensor is another object
            storage = thing.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def growth(before: int) -> int:
    """Return how many bytes more are held than before, and stay.

    A thread of the backend lets go of a message some time after it was waited for.
    """
    for _ in range(_WAITS):
        grown = held_bytes(()) - before
        if grown <= SMALL:
            break
        time.sleep(0.05)
    return grown


def closed(program: Program, scene: Scene) -> list[frozenset[str]]:
    """Return the parameters that may not be full after each call."""
    toy = scene["toy"][0]
    module = TOYS[toy].build(0)
    every = frozenset(parameters(toy, 0))
    after_forward = {
        "freed": every,
        "usual": frozenset(parameters_of_units(module, scene.word("units"))),
    }.get(scene.word("reshard"), frozenset())
    runs_all = scene.word("toy") in STEPPED
    found, now, is_kept, waits = [], every, False, False
    for call in program:
        name, ends = call[0], VERBS[call[0]].ends
        waits = name == "forward" or (waits and name not in ("pending", "resumed"))
        is_kept = call == ("keep", "True") or (is_kept and call != ("keep", "False"))
        if name == "reshard":
            now = every
        elif ends == "open":
            now = frozenset()
        elif ends == "backward":
            now = frozenset() if is_kept or waits else every
        elif ends == "forward":
            now = after_forward if runs_all and not is_kept else now & after_forward
        found.append(now)
    return found


def judge_shown(ranks: Sequence[Sequence[dict[str, Any]]], scene: Scene, program: Program) -> None:
    """After each call full weights must be shards again, where no setting keeps them."""
    __tracebackhide__ = True
    every = frozenset(parameters(scene["toy"][0], 0))
    ignored = {[*parameters(scene["toy"][0], 0)][number] for number in scene["ignored"]}
    for number, names in enumerate(closed(program, scene)):
        for rank, calls in enumerate(ranks):
            full = sorted(names.intersection(calls[number]["full"]) - ignored)
            judge.holds(
                not full,
                f"rank {rank}, after {' '.join(program[number])!r} (call {number + 1}): expected "
                f"shards, got full weights of {', '.join(map(repr, full[:3]))}",
                likely="a unit stays open after its pass, or a reshard does nothing",
            )
            grown = calls[number].get("grown", 0)
            judge.holds(
                grown <= SMALL or names != every,
                f"rank {rank}, {' '.join(program[number])!r} (call {number + 1}): expected full "
                f"weights to be freed, got {grown} bytes more in memory than before the call",
                likely="a unit stays open after its pass, or was gathered ahead and not discarded",
            )
