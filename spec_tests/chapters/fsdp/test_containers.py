"""Containers: inputs and outputs in dicts, lists, named tuples and dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from spec_tests.chapters.fsdp import sharded
from spec_tests.chapters.fsdp.test_precision import in_half
from spec_tests.programs.laws import refusal
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses

clause = clauses(judges=sharded.FULLY_SHARD, level="correct", worlds=(2, 3))


class Both(NamedTuple):
    """A tuple with names."""

    y: torch.Tensor
    z: torch.Tensor


@dataclass
class Found:
    """An output with names, as many models give it."""

    y: torch.Tensor
    z: torch.Tensor


@dataclass
class Nested:
    """The same in fields that are containers."""

    first: list[torch.Tensor]
    second: dict[str, torch.Tensor]


class Bag(dict[str, Any]):
    """A dict with a class, as libraries give it."""


class Row(list[Any]):
    """A list with a class."""


@dataclass
class Doubles(Found):
    """Code of its own runs when one is made."""

    def __post_init__(self) -> None:
        self.y = 2 * self.y


@dataclass
class FilledLater:
    """Fields that are not among the arguments."""

    y: torch.Tensor = field(init=False)
    z: torch.Tensor = field(init=False)


def filled(y: torch.Tensor, z: torch.Tensor) -> FilledLater:
    made = FilledLater()
    made.y, made.z = y, z
    return made


KINDS: dict[str, Any] = {
    "containers": lambda y, z: {"y": y, "z": z},
    "second-alone": lambda y, z: {"y": y, "z": z},
    "named-tuple": Both,
    "dataclass": Found,
    "dataclass-of-containers": lambda y, z: Nested([y], {"z": z}),
}
BOXES: dict[str, Any] = {
    "list": lambda y, z: [y, z],
    "dict": KINDS["containers"],
    "dataclass": Found,
}
OWN: dict[str, Any] = {
    "dict": lambda y, z: Bag(y=y, z=z),
    "list": lambda y, z: Row([y, z]),
    "computing-dataclass": Doubles,
    "dataclass-filled-later": filled,
}


def held(box: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The two tensors that a container holds."""
    if isinstance(box, dict):
        return box["y"], box["z"]
    if isinstance(box, Nested):
        return box.first[0], box.second["z"]
    return (box[0], box[1]) if isinstance(box, list) else (box.y, box.z)


class Inner(nn.Module):
    """Two layers whose inputs and outputs sit in containers that `make` makes."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(6, 12), nn.Linear(6, 12)
        self.make = make

    def forward(self, *, batch: Any, scale: int) -> Any:
        x, bias = held(batch)
        return self.make(self.linear(x) * scale, self.other(x + bias).abs())


class Structured(nn.Module):
    """Takes nested containers by keyword, and gives them."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(6))
        self.inner = Inner(make)

    def forward(self, inputs: dict[str, Any]) -> dict[str, Any]:
        x = inputs["x"] * self.gain
        batch = self.inner.make(x, torch.ones_like(x))
        if isinstance(batch, dict):
            batch["tags"] = ["a", 1]
        y, z = held(self.inner(batch=batch, scale=2))
        return {"parts": (y, [z]), "times": 2, "note": "kept"}


def built(kind: str) -> Any:
    """A model of integers."""
    return sharded.of_integers(Structured((KINDS | OWN)[kind]))


def called(model: Any, x: torch.Tensor, second_alone: bool = False) -> dict[str, torch.Tensor]:
    """Both outputs, or the second alone; a number and a word come through as they are."""
    found = model(inputs={"x": x})
    if found["note"] != "kept":
        raise AssertionError(f"expected the word 'kept' beside the outputs, got {found['note']!r}")
    first, (second,) = found["parts"]
    return {"second": second} | ({} if second_alone else {"first": first * found["times"]})


def contained(kind: str) -> sharded.Own:
    """A model whose outputs sit in containers of a kind."""
    call = partial(called, second_alone=kind == "second-alone")
    return sharded.Own(partial(built, kind), call, tracks_input=kind in KINDS)


@clause(
    "fsdp.forward.nested-containers",
    judges=sharded.BOTH,
    source="contract: containers, same-containers; "
    "test_fully_shard_training: inputs and outputs in containers, keyword arguments",
)
@pytest.mark.parametrize("outputs", KINDS)
def test_inputs_and_outputs_may_sit_in_containers(world, subject, outputs):
    """Inputs by keyword and outputs in nested containers MUST get right gradients.

    A hook on tensors alone, or on the first of them, never sees that such a module's backward
    begins. A dataclass may be refused, by the forward.
    """
    may_refuse = outputs.startswith("dataclass")
    usual = contained("containers") if may_refuse else None
    own = contained(outputs)
    sharded.steps_as_alone(world, subject, own, usual=usual, given=outputs, notes_late=may_refuse)


@clause(
    "fsdp.forward.containers-of-ones-own",
    level="production",
    source="contract: own-containers; UserDict, ModelOutput, a batch",
    worlds=(2,),
)
@pytest.mark.parametrize("kind", OWN)
def test_containers_of_ones_own_classes_are_taken_or_refused(world, subject, kind):
    """Tensors in dicts, lists and dataclasses of one's own MUST be seen, or an error says no.

    One that is not looked into hides that its backward begins; one that is made anew runs the
    code of its class a second time, and forgets what is no argument of it.
    """
    usual = contained("containers")
    sharded.steps_as_alone(world, subject, contained(kind), usual=usual, given=kind)


def boxed(ctx, subject, kind):
    """Whether the caller's container holds the caller's tensors after a forward."""
    x = torch.ones(2, 6, device=ctx.device, requires_grad=True)
    box = BOXES[kind](x, x)
    in_half(ctx, subject, Inner(KINDS["containers"]), "root")(batch=box, scale=2)
    return [tensor is x for tensor in held(box)]


@clause(
    "fsdp.precision.callers-inputs",
    needs=("MixedPrecisionPolicy",),
    source="contract: same-containers, dataclasses",
    worlds=(2,),
)
@pytest.mark.parametrize("kind", BOXES)
def test_what_is_cast_on_the_way_in_stays_the_callers(world, subject, kind):
    """A forward MUST leave what a container of inputs holds as it was, or refuse a dataclass."""
    usual = (boxed, subject, "list")
    ranks = refusal.answer_or_refusal(world, boxed, subject, kind, ordinary=usual)

    judge.holds(ranks is not None or kind == "dataclass", f"expected a {kind} to be taken")
    if ranks is not None:
        judge.equal(ranks, [True, True], quantity="whether the box holds the same tensors:")
