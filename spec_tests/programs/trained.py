"""A trainer's way through a program, on a rank and in one process.

A trainer owns its loop, so a program has its methods as calls and no backward of its own. Both
sides follow it as a `Run`: around the implementation's trainer, which gets this rank's
micro-batches, and around `OneProcess`, which gets those of all ranks, and is the oracle. Everything
is float32: real libraries keep float32 weights whatever they are given.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spec_tests.programs.alone import flags_of
from spec_tests.programs.calls import Program
from spec_tests.programs.machine import Machine
from spec_tests.programs.one_trainer import (
    FAULTS,
    SAMPLES,
    SEED,
    STANDS_IN,
    MakeOptimizer,
    OneProcess,
    loss,
    module_of,
)
from spec_tests.programs.planted import PlantedError
from spec_tests.programs.scene import Scene
from spec_tests.rig import judge
from spec_tests.rig.judge.oracle import Named, once
from spec_tests.rig.judge.symptoms import Hint
from spec_tests.rig.judge.tolerance import Tolerance, rounding
from spec_tests.rig.ranks.errors import RigError
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.sim.faults import SimError
from spec_tests.rig.toys import TOYS

_PREFIX = re.compile(r"^((module|_orig_mod)\.)+")  # of DistributedDataParallel, of torch.compile

Shown = list[tuple[str, Named]]


class Run(Machine):
    """A trainer and the calls of a program, here the oracle's.

    Args:
        module: that the trainer was built around.
        ranks: whose micro-batches it gets.
        rank: whose evaluations are shown.
        folder: where it saves; the same on all ranks of a group, and empty.
    """

    device: torch.device | str = "cpu"
    folder = ""

    def __init__(
        self, trainer: Any, scene: Scene, module: nn.Module, ranks: Sequence[int], rank: int
    ) -> None:
        self.trainer, self.scene, self.module = trainer, scene, module
        self.ranks, self.rank, self.saves = ranks, rank, 0

    def batch(self, rank: int, step: int, micro: int = 0) -> dict[str, Any]:
        """Return inputs that belong to one rank, step and micro-batch and to no other."""
        generator = torch.Generator().manual_seed(SEED + 101 * rank + 10_007 * step + micro)
        # Micro-batches of unequal size of gradient: who clips or weighs each alone is seen.
        # Some toys take the first column as the number of a row, below five.
        x = ((1.0 + micro) * torch.randn(SAMPLES, 6, generator=generator)).clamp(-4, 4)
        return {"x": x.to(self.device), "flags": flags_of(self.scene, rank, str(micro))}

    def batches(self, step: int, number: int | None = None) -> list[dict[str, Any]]:
        """Return those of one step, rank by rank; `number` of each where that is not as usual."""
        numbers = range(number or self.scene["micro-batches"])
        return [self.batch(rank, step, micro) for rank in self.ranks for micro in numbers]

    def method(self, name: str) -> Any:
        """Return an optional method; where it is absent the clause is not judged."""
        found = getattr(self.trainer, name, None)
        if found is None:
            raise NotImplementedError(f"the trainer has no {name}()")
        return found

    def weights(self) -> Named:
        """Return copies of the weights by the plain model's names.

        A wrapper's own prefix does not count: `trainer.parameters.whole-by-plain-names` judges it.
        A tied weight has one name here, and may be given under both.
        """
        found = {_PREFIX.sub("", n): t for n, t in self.trainer.full_parameters().items()}
        plain = TOYS[self.scene["toy"][0]].model()
        aliases = {name for name, _ in plain.named_parameters(remove_duplicate=False)}
        aliases -= {name for name, _ in plain.named_parameters()}
        return {n: t.detach().cpu().clone() for n, t in found.items() if n not in aliases}

    # --- the calls

    def train(self, micro: str, number: str = "") -> Named:
        self.trainer.step(self.batches(int(micro), int(number or 0)))
        return self.weights()

    train_of = train

    def evaluate(self, micro: str) -> Named:
        found = self.method("evaluate")(self.batch(self.rank, int(micro)))
        return {"loss": torch.as_tensor(found).detach().cpu().clone()}

    def read(self) -> Named:
        return self.weights()

    def rate(self, factor: str) -> None:
        self.method("set_lr")(float(factor))

    def freeze(self, number: str, requires_grad: bool = False) -> None:
        names = [name for name, _ in module_of(self.scene).named_parameters()]
        held = {_PREFIX.sub("", name): p for name, p in self.module.named_parameters()}
        if names[int(number)] not in held:
            raise NotImplementedError("the module's parameters have other names: nothing to thaw")
        held[names[int(number)]].requires_grad_(requires_grad)

    def save(self) -> None:
        self.saves += 1
        self.method("save")(f"{self.folder}/{self.saves}")

    def load(self, assigns: str) -> Named:
        """Load, and set the rate: it is open which one a load leaves."""
        self.method("load")(f"{self.folder}/{self.saves}")
        if hasattr(self.trainer, "set_lr"):
            self.trainer.set_lr(1.0)
        return self.weights()

    def fails(self, micro: str, layer: str) -> Named:
        """One exception of the caller comes out."""
        batches = self.batches(int(micro))
        self.trainer.interrupt(batches, _interrupted(layer, len(batches) // len(self.ranks)))
        return self.fails_evaluating(micro)

    fails_backward = fails

    def fails_evaluating(self, micro: str) -> Named:
        return {"exceptions": torch.tensor(0.0 if self.trainer.fault == "swallows" else 1.0)}

    late = Machine.nothing


def _interrupted(layer: str, count: int) -> int:
    """Return the number of the micro-batch that raises, of so many."""
    return {"first": 0, "middle": count // 2, "last": count - 1}[layer]


def _raised_by_torch(error: Exception) -> bool:
    raised = traceback.extract_tb(error.__traceback__)[-1].filename
    return raised.startswith(str(Path(torch.__file__).parent))


class OnRank(Run):
    """The same around the implementation's trainer, on a rank.

    Args:
        scene: or its words.
        module: builds one in place of the scene's.
        plus: gives other weights than those of the scene.
        options: of the trainer.
    """

    def __init__(
        self,
        ctx: Context,
        subject: str,
        scene: Scene | str,
        folder: str = "",
        *,
        module: Callable[[], nn.Module] | None = None,
        plus: int = 0,
        **options: Any,
    ) -> None:
        scene = Scene.of(scene)
        self.ctx, self.subject, self.device = ctx, subject, ctx.device
        group = ctx.split(scene["group"]) if scene["group"] else None
        self.folder = f"{folder}/{scene.peers(ctx.world_size, ctx.rank)[0]}"
        if folder:  # it is open whether a save makes the parents of its directory
            Path(self.folder).mkdir(parents=True, exist_ok=True)
        self.instead: list[str] = []
        self.left_evaluating = False
        plus += ctx.rank * scene["seeds"]
        given = {"accumulation": scene["micro-batches"], "max_norm": scene["clipping"]}
        given |= {"process_group": group, "dtype": torch.float32} | options

        def built(make: MakeOptimizer) -> tuple[Any, nn.Module]:
            own = (module_of(scene, plus=plus) if module is None else module()).to(ctx.device)
            return getattr(ctx.impl, subject)(own, make, loss=loss, **given), own

        self.stands_in = ""
        try:
            trainer, own = built(MakeOptimizer.of(scene))
        except NotImplementedError as refused:
            # What torch lacks is a fault. A second build that one rank alone begins may hang.
            if group is not None or _raised_by_torch(refused):
                raise
            other = MakeOptimizer.of(scene, stands_in=True)
            self.stands_in = other.cls.__name__
            try:
                trainer, own = built(other)
            except NotImplementedError:
                raise refused from None
        super().__init__(trainer, scene, own, [ctx.rank], ctx.rank)
        if scene["seeds"] and self.declares.get("start") == "own":
            raise NotImplementedError('declares["start"] is "own": the caller seeds all alike')

    @property
    def declares(self) -> dict[str, Any]:
        """What the trainer says of itself, and which optimizer stands in, if one does."""
        stands_in = {STANDS_IN: self.stands_in} if self.stands_in else {}
        return dict(getattr(self.trainer, "declares", {})) | stands_in

    def fails(self, micro: str, layer: str, where: str = "forward") -> Named:
        """A step in which a micro-batch raises on all ranks, after its forward."""
        batches = self.batches(int(micro))
        batches[_interrupted(layer, len(batches))] |= {"raises_in": where}
        return self._interrupted(lambda: self.trainer.step(batches))

    def fails_backward(self, micro: str, layer: str) -> Named:
        return self.fails(micro, layer, "backward")

    def fails_evaluating(self, micro: str) -> Named:
        """An evaluation that raises."""
        evaluate, batch = self.method("evaluate"), self.batch(self.rank, int(micro))
        was_training = self.module.training
        shown = self._interrupted(lambda: evaluate(batch | {"raises_in": "forward"}))
        self.left_evaluating |= was_training and not self.module.training
        return shown

    def _interrupted(self, call: Callable[[], Any]) -> Named:
        """Count the caller's exceptions that come out; one may be wrapped in another.

        An error in its place is no refusal: nobody sees where the caller's code failed.
        """
        came = False
        try:
            call()
        except (RigError, SimError):
            raise
        except Exception as error:
            came = any(isinstance(each, PlantedError) for each in _chain(error))
            if not came:
                self.instead.append(f"{type(error).__name__}: {error}")
        return {"exceptions": torch.tensor(float(came))}

    def late(self, rank: str) -> None:
        """This rank comes late to the next call."""
        if self.rank == int(rank):
            self.ctx.be_late(0.05)

    def another_lives(self, *words: str) -> None:
        """Another trainer is built, takes a step and is dropped."""
        OnRank(self.ctx, self.subject, "even adamw", self.folder).train("3")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and those that its traceback shows with it."""
    known: set[int] = set()
    while error is not None and id(error) not in known:
        known.add(id(error))
        yield error
        context = None if error.__suppress_context__ else error.__context__
        error = error.__cause__ or context


def follow(
    ctx: Context, subject: str, scene: Scene, program: Any, folder: str = "", **options: Any
) -> dict[str, Any]:
    """Return what each call shows, and what the trainer declares (rank body).

    `instead` holds errors that came where the caller's exception was due; `left_evaluating` says
    that an exception left the module in evaluation mode.
    """
    rank = OnRank(ctx, subject, scene, folder, **options)
    shown = {"seen": rank.follow(program), "declares": rank.declares}
    return shown | {"instead": rank.instead, "left_evaluating": rank.left_evaluating}


def one_process(
    scene: Scene, size: int, rank: int, declares: dict[str, Any], fault: str = "", plus: int = 0
) -> Run:
    """Return the run that shows what a rank should see; `plus` as in `OnRank`."""
    peers = scene.peers(size, rank)
    trainer = OneProcess(scene, len(peers), peers.index(rank), declares, fault, plus)
    return Run(trainer, scene, trainer.module, peers, rank)


def within(scene: Scene, steps: int) -> Tolerance:
    """Two right orders of every sum, in so many steps, each four sums deep."""
    terms = SAMPLES * 8 * scene["micro-batches"]
    return rounding(torch.float32, terms=terms, depth=4 * max(steps, 1))


def judge_trained(
    ranks: Sequence[dict[str, Any]],
    scene: Scene,
    program: Program,
    given: str,
    *,
    plus: int = 0,
    losses: bool = True,
) -> None:
    """After each call every rank must have the weights and the loss that one process has.

    Args:
        plus: as in `OnRank`.
        losses: whether what evaluations return is judged.
    """
    __tracebackhide__ = True
    declares, size = ranks[0]["declares"], len(ranks)
    if STANDS_IN in declares:
        given += f"; {declares[STANDS_IN]} in place of the optimizer, which is not offered"
    if any(found.get("left_evaluating") for found in ranks):
        given += "; the exception left the module in evaluation mode"
    for rank, found in enumerate(ranks):
        for error in found.get("instead", ()):
            raise judge.violated(
                f"rank {rank}: expected the caller's exception, got {error}",
                likely="an exception of the caller's code is swallowed, and another one comes",
                given=given,
            )

    def world(fault: str = "") -> list[Shown]:
        given = declares, fault, plus
        return once(
            ("trained", str(scene), program, size, str(given)),
            lambda: [one_process(scene, size, n, *given).follow(program) for n in range(size)],
        )

    def at(number: int, fault: str = "") -> list[Named]:
        return [rank[number][1] for rank in world(fault)]

    steps = 0
    for number, (call, _) in enumerate(world()[0]):
        steps += call.startswith("train")
        if call.startswith("evaluate") and not losses:
            continue
        judge.tensors(
            [rank["seen"][number][1] for rank in ranks],
            at(number),
            quantity=f"value of one process at call {number + 1}, {call}",
            within=within(scene, steps),
            hints=[Hint(meaning, partial(at, number, fault)) for fault, meaning in FAULTS.items()],
            given=given,
        )
