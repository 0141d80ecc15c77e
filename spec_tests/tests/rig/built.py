"""Right code that has built the tasks of a skeleton up to one, and raises ToDo in what comes later.

It is the shortest right code without what later tasks of `contract/skeletons` add: the clauses of a
task must not need that.
"""

# ruff: noqa: D102 - a method does what the one that it replaces says, and no more than its class

# mypy: disable-error-code="override, no-untyped-def, assignment"

from __future__ import annotations

import os
from typing import Any, NoReturn

from torch import nn

from spec_tests.plain.attention import PlainAttention
from spec_tests.plain.ddp import PlainDdp
from spec_tests.plain.fully_shard import FSDPModule, PlainFsdp
from spec_tests.plain.loader import PlainLoader
from spec_tests.plain.train import PlainTrain
from spec_tests.plain.zero1 import PlainZero1


class ToDo(Exception):
    """A later task."""


def later(*args: Any, **kwargs: Any) -> NoReturn:
    """Do what a later task adds."""
    raise ToDo("a later task")


def nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing: what a later task adds is not noticed to be missing."""


# ---------------------------------------------------------------------------------------------- ddp


class Ddp1(PlainDdp):
    """Replicas that start equal."""

    register = no_sync = nothing
    finish = later


class Ddp2(PlainDdp):
    """All is sent at the end, a parameter at a time; the group is always the whole world."""

    register = before_training_forward = require_no_others = nothing
    no_sync = later


class Ddp3(Ddp2):
    """Accumulates."""

    no_sync = PlainDdp.no_sync


# -------------------------------------------------------------------------------------------- zero1


class Zero1(PlainZero1):
    """Parameters have owners. Options and later groups are not looked at, nor is the state."""

    hand_in = show = nothing
    state_dict = load_state_dict = full_state = later

    def add_param_group(self, param_group):
        if self.inner is not None:
            later()
        super().add_param_group(param_group)


class Zero2(PlainZero1):
    """Options are live; the state is not shown."""

    state_dict = load_state_dict = full_state = later

    def show(self):
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            outer.update({k: v for k, v in inner.items() if k != "params"})


# --------------------------------------------------------------------------------------------- fsdp


def methods(*built: str) -> type:
    """The class of the methods that a sharded module has; those that are not built raise."""
    names = [n for n in vars(FSDPModule) if not n.startswith("_") and n not in built]
    return type("FSDPModule", (FSDPModule,), dict.fromkeys(names, later))


class Fsdp3(PlainFsdp):
    """Gathers whenever it computes, and sees no update: nothing is kept that could be stale."""

    refuses = False
    offers = methods()
    recover = require_no_others = before_state_dict = before_load = after_step = free = nothing

    def is_fresh(self):
        return False

    def adopt(self):
        for piece in self.pieces:
            if piece.full is not None:
                piece.full.requires_grad_(piece.parameter.requires_grad)

    def next_in_backward(self):
        return []

    @classmethod
    def class_of(cls, kind):
        return type(f"FSDP{kind.__name__}", (cls.offers, kind), {})


class Fsdp1(Fsdp3):
    """Cuts."""

    pre_forward = later


class Fsdp2(Fsdp3):
    """Gathers in forward."""

    pre_backward = later


class Fsdp4(PlainFsdp):
    """Frees, and sees what changes shards."""

    offers = methods(
        "unshard", "reshard", "set_reshard_after_backward", "set_reshard_after_forward"
    )
    next_in_backward = Fsdp3.next_in_backward
    class_of = Fsdp3.__dict__["class_of"]


class Fsdp5(Fsdp4):
    """Accumulates, in any dtype; a message for each parameter."""

    offers = methods(*(n for n in vars(FSDPModule) if "prefetch" not in n))

    def by_dtype(self):
        return [[piece] for piece in self.pieces]


# ---------------------------------------------------------------------------------------- attention


class Attention1(PlainAttention):
    """The forward of rows that all see a key, with as many heads of keys as of queries."""

    def backward(self, *args):
        raise NotImplementedError("task 3")

    def check(self, q, k, v):
        if q.ndim == 3 or q.shape[1] != k.shape[1]:
            later()

    def safe(self, m):
        return m

    def normalised(self, acc, norm):
        return acc / norm[..., None]

    def is_skipped(self, rows, keys, shift):
        return False


class Attention2(Attention1):
    """The same of any row."""

    safe, normalised = PlainAttention.safe, PlainAttention.normalised


class Attention3(Attention2):
    """With its backward."""

    backward = PlainAttention.backward


# ------------------------------------------------------------------------------------------- loader


class Loader3(PlainLoader):
    """Has no state."""

    state_dict = load_state_dict = later


class Loader2(Loader3):
    """Refuses no argument, and half an environment is taken for what it is not."""

    check_arguments = nothing

    def from_environment(self):
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Loader1(Loader2):
    """One rank alone."""

    def who(self, rank, size):
        if (rank, size) != (0, 1):
            later()
        return 0, 1


# ------------------------------------------------------------------------------------------ trainer


class Train2(PlainTrain):
    """The gradient alone: nothing is clipped, set or reported."""

    def clip(self):
        return later() if self.max_norm is not None else 0.0

    def set_rate(self, number):
        if self.lr is not None:
            later()

    def rate(self):
        return 0.0

    def record(self, **fields):
        return {}


class Train3(PlainTrain):
    """Does not look whether a norm is finite."""

    def clip(self):
        limit = float("inf") if self.max_norm is None else self.max_norm
        return float(nn.utils.clip_grad_norm_(self.model.parameters(), limit))


CLASSES: dict[tuple[str, int], Any] = {
    ("ddp", 1): Ddp1,
    ("ddp", 2): Ddp2,
    ("ddp", 3): Ddp3,
    ("zero1", 1): Zero1,
    ("zero1", 2): Zero2,
    ("fsdp", 1): Fsdp1,
    ("fsdp", 2): Fsdp2,
    ("fsdp", 3): Fsdp3,
    ("fsdp", 4): Fsdp4,
    ("fsdp", 5): Fsdp5,
    ("attention", 1): Attention1,
    ("attention", 2): Attention2,
    ("attention", 3): Attention3,
    ("loader", 1): Loader1,
    ("loader", 2): Loader2,
    ("loader", 3): Loader3,
    ("trainer", 2): Train2,
    ("trainer", 3): Train3,
}
LEFT_OUT = {"ddp": ("ddp_bucketed",)}
"""What a skeleton does not offer before a later task is begun."""


def functions(subject: str, task: int) -> dict[str, Any]:
    """Return the functions of the contract with the tasks of a subject built up to one."""
    found: dict[str, Any] = CLASSES[subject, task].functions()
    for name in LEFT_OUT.get(subject, ()):
        del found[name]
    if subject == "fsdp" and task < 5:
        found["MixedPrecisionPolicy"] = later
    if subject == "fsdp" and task < 3:
        found["finish_gradient_synchronization"] = later
    return found
