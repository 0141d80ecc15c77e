"""A trainer's way through a program: one class for the oracle and for a rank.

A trainer owns its loop, so a program has its methods as calls and no backward of its own. Both
sides follow them around a `Session` of `laws.task`: one process that gets the micro-batches of all
ranks is the oracle.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from spec_tests.programs.calls import Program
from spec_tests.programs.laws import task
from spec_tests.programs.planted import PlantedError
from spec_tests.programs.scene import Scene
from spec_tests.rig import judge
from spec_tests.rig.judge.oracle import Named, once
from spec_tests.rig.judge.symptoms import Hint
from spec_tests.rig.ranks.rank import Context

Shown = list[tuple[str, Named]]


def setup_of(scene: Scene) -> task.Setup:
    """Return model, optimizer and options of a trainer."""
    return task.Setup(
        toy=scene["toy"][0],
        optimizer=scene.word("moments"),
        accumulation=scene["micro-batches"],
        max_norm=scene["clipping"],
        splits=scene.word("groups") == "two-groups",
    )


def module_of(scene: Scene) -> nn.Module:
    """Return the model, with what the scene freezes."""
    module = setup_of(scene).module()
    parameters = list(module.parameters())
    for number in scene["trained"]:
        parameters[number].requires_grad_(False)
    return module


class Trained:
    """A trainer, here that of one process, which is the oracle of one rank.

    Args:
        session: around the trainer.
        rank: whose evaluations are shown.
    """

    def __init__(self, session: task.Session, rank: int) -> None:
        self.session, self.rank = session, rank
        self.saves = 0
        self.saved: Any = None

    def follow(self, program: Program) -> Shown:
        """Return the weights after each call that may change them, and losses."""
        seen = []
        for name, *words in program:
            found = getattr(self, name)(*words)
            if found is not None:
                seen.append((" ".join((name, *words)), found))
        return seen

    def train(self, micro: str) -> Named:
        self.session.trainer.step(self.session.micro_batches(int(micro)))
        return self.session.weights()

    def evaluate(self, micro: str) -> Named:
        evaluate = task.method(self.session.trainer, "evaluate")
        found = evaluate(self.session.batch(self.rank, int(micro)))
        return {"loss": torch.as_tensor(found).detach().cpu().clone()}

    def rate(self, factor: str) -> None:
        task.method(self.session.trainer, "set_lr")(float(factor))

    def save(self) -> None:
        optimizer = self.session.trainer.optimizer.state_dict()
        self.saved = task.copied((self.session.weights(), optimizer))

    @torch.no_grad()
    def load(self, assigns: str) -> Named:
        weights, optimizer = task.copied(self.saved)
        for name, parameter in self.session.module.named_parameters():
            parameter.copy_(weights[name])
        self.session.trainer.optimizer.load_state_dict(optimizer)
        return self._loaded()

    def _loaded(self) -> Named:
        """Return the weights; it is open which rate a load leaves, so it is set."""
        if hasattr(self.session.trainer, "set_lr"):
            self.session.trainer.set_lr(1.0)
        return self.session.weights()

    def nothing(self, *words: str) -> None:
        """Of the oracle nothing is seen."""

    fails = another_steps = another_lives = nothing


class OnRanks(Trained):
    """The same around the implementation's trainer, on a rank.

    Args:
        folder: the same on all ranks, and empty.
    """

    def __init__(self, ctx: Context, subject: str, scene: Scene, folder: str) -> None:
        self.ctx, self.subject, self.scene = ctx, subject, scene
        group = ctx.split(scene["group"]) if scene["group"] else None
        self.folder = f"{folder}/{scene.peers(ctx.world_size, ctx.rank)[0]}"
        found = task.session(
            ctx, subject, setup_of(scene), group=group, loss=_loss, module=module_of(scene)
        )
        super().__init__(found, ctx.rank)

    def save(self) -> None:
        self.saves += 1
        task.method(self.session.trainer, "save")(f"{self.folder}/{self.saves}")

    def load(self, assigns: str) -> Named:
        task.method(self.session.trainer, "load")(f"{self.folder}/{self.saves}")
        return self._loaded()

    def fails(self, *words: str) -> None:
        """A step in which a micro-batch raises on all ranks, after its forward."""
        micro, layer = words
        batches = self.session.micro_batches(int(micro))
        number = {"first": 0, "middle": len(batches) // 2, "last": -1}[layer]
        batches[number] = {**batches[number], "raises": True}
        with contextlib.suppress(PlantedError):
            self.session.trainer.step(batches)

    def another_steps(self, *words: str) -> None:
        """A model of its own is trained by one rank alone."""
        if self.ctx.rank == int(words[0]):
            probe = nn.Linear(2, 2)
            probe(torch.ones(1, 2)).sum().backward()
            torch.optim.SGD(probe.parameters(), lr=0.5).step()

    def another_lives(self, *words: str) -> None:
        """Another trainer is built, takes a step and is dropped."""
        OnRanks(self.ctx, self.subject, Scene.of("even adamw"), self.folder).train("3")


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    found = task.loss(model, batch)
    if "raises" in batch:
        raise PlantedError
    return found


def follow(
    ctx: Context, subject: str, scene: Scene, program: Program, folder: str
) -> dict[str, Any]:
    """Return what each call shows, and what the trainer declares (rank body)."""
    rank = OnRanks(ctx, subject, scene, folder)
    return {"seen": rank.follow(program), "declares": task.declared(rank.session.trainer)}


def alone(
    scene: Scene, program: Program, size: int, rank: int, declares: dict[str, Any], fault: str = ""
) -> Shown:
    """Return what a rank should see."""
    peers = scene.peers(size, rank)
    setup, module = setup_of(scene), module_of(scene)
    trainer = task.OneProcess(setup, module, len(peers), declares, fault)
    return Trained(task.Session(trainer, setup, peers, module), rank).follow(program)


def judge_trained(
    ranks: Sequence[dict[str, Any]], scene: Scene, program: Program, given: str
) -> None:
    """After each call every rank must have the weights and the loss that one process has."""
    __tracebackhide__ = True
    declares, size = ranks[0]["declares"], len(ranks)

    def world(fault: str = "") -> list[Shown]:
        def compute() -> list[Shown]:
            return [alone(scene, program, size, rank, declares, fault) for rank in range(size)]

        return once(("trained", given, size, str(declares), fault), compute)

    def at(number: int, fault: str = "") -> list[Named]:
        return [rank[number][1] for rank in world(fault)]

    steps = 0
    for number, (call, _) in enumerate(world()[0]):
        steps += call.startswith("train")
        judge.tensors(
            [rank["seen"][number][1] for rank in ranks],
            at(number),
            quantity=f"value of one process at call {number + 1}, {call}",
            within=task.within(setup_of(scene), steps),
            hints=[
                Hint(meaning, partial(at, number, fault)) for fault, meaning in task.FAULTS.items()
            ],
            given=given,
        )
