"""Containers of one's own: dicts, lists and dataclasses of classes that PyTorch has not met."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from spec_tests.chapters.fsdp.sharded import FULLY_SHARD, of_integers
from spec_tests.programs.laws import refusal
from spec_tests.rig import judge
from spec_tests.rig.clause import clauses
from spec_tests.rig.judge.symptoms import Hint
from spec_tests.rig.toys import TOYS

clause = clauses(judges=FULLY_SHARD, level="production", worlds=(2,))


class Bag(dict[str, Any]):
    """A dict with a class, as libraries give it."""


class Row(list[Any]):
    """A list with a class."""


@dataclass
class Doubles:
    """Code of its own runs when one is made."""

    x: torch.Tensor

    def __post_init__(self) -> None:
        self.x = 2 * self.x


@dataclass
class FilledLater:
    """A field that is not among the arguments."""

    x: torch.Tensor = field(init=False)


def filled(x: torch.Tensor) -> FilledLater:
    """One of them, filled."""
    made = FilledLater()
    made.x = x
    return made


KINDS: dict[str, Any] = {
    "dict": lambda x: Bag(x=x),
    "list": lambda x: Row([x]),
    "computing-dataclass": Doubles,
    "dataclass-filled-later": filled,
}


def held(box: Any) -> torch.Tensor:
    """What a container holds."""
    found: torch.Tensor = (
        box["x"] if isinstance(box, dict) else box[0] if isinstance(box, list) else box.x
    )
    return found


class Layer(nn.Module):
    """Takes its input in a container, and gives its output in one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(6, 12)

    def forward(self, box: Any) -> Any:
        return KINDS[self.kind](self.linear(held(box)))


class Model(nn.Module):
    """Two units that hand a container from one to the other; `plain` for no container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(6, 6)
        self.layer = Layer(kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return held(self.layer(KINDS[self.kind](self.first(x))))


def contained(ctx, subject, kind):
    """The output, and the weights after a step."""
    model = of_integers(nn.Linear(6, 12) if kind is None else Model(kind)).to(ctx.device)
    if kind is not None:
        ctx.impl.fully_shard(model.layer)
    ctx.impl.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    output = model(TOYS["mlp"].batch(7, rank=ctx.rank).to(ctx.device))
    (ctx.world_size * output.square().sum()).backward()
    optimizer.step()
    weights = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    return {"output": output.detach(), "weights": weights}


@clause(
    "fsdp.forward.containers-of-ones-own",
    source="contract: own-containers; UserDict, ModelOutput, a batch",
)
@pytest.mark.parametrize("kind", KINDS)
def test_containers_of_ones_own_classes_are_taken_or_refused(world, subject, kind):
    """Tensors in dicts, lists and dataclasses of one's own MUST be seen, or an error says no.

    One that is not looked into hides that its backward begins; one that is made anew runs the
    code of its class a second time, and forgets what is no argument of it.
    """
    ordinary = (contained, subject, None)
    ranks = refusal.answer_or_refusal(world, contained, subject, kind, ordinary=ordinary)

    if ranks is None:
        return
    plain = of_integers(Model(kind))
    before = {name: p.detach().clone() for name, p in plain.named_parameters()}
    outputs = [plain(TOYS["mlp"].batch(7, rank=rank)) for rank in range(world.size)]
    sum(output.square().sum() for output in outputs).backward()
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    judge.tensors(
        [{"y": rank["output"]} for rank in ranks],
        [{"y": output.detach()} for output in outputs],
        quantity="output",
        given=kind,
    )
    judge.tensors(
        [rank["weights"] for rank in ranks],
        {name: p.detach() for name, p in plain.named_parameters()},
        quantity="weight after one step",
        hints=[Hint("the weight from before: no gradient came", before)],
        given=kind,
    )
