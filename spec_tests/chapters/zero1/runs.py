"""What bodies of this chapter share: a script on the ranks and alone, and the bytes of the state.

A script takes a `Stepped` (`programs/stepped.py`), trains, and returns what it saw. On a rank the
optimizer is the implementation's, alone it is the plain one, which is the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from spec_tests.programs.alone import SEED as SEED  # the chapter takes it from here
from spec_tests.programs.law import within_steps
from spec_tests.programs.laws import footprint
from spec_tests.programs.scene import AXES, Scene
from spec_tests.programs.stepped import FAULTS, Divided, Stepped
from spec_tests.rig import judge
from spec_tests.rig.judge import oracle
from spec_tests.rig.judge.symptoms import Hint
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.world import World
from spec_tests.rig.toys import TOYS

Script = Callable[[Stepped], oracle.Named]
OPTIMIZERS = {name: word.value for name, word in AXES["moments"].items()}
TOY = "even"
"""Two, three and four ranks divide each parameter: `zero1.step.equals-unsharded` is about sizes."""
TWO = f"{TOY} first-two"
"""Fewer parameters than ranks, where there are more than two of these."""
WIDTH, DEPTH = 48, 8  # two, three and four ranks divide the width


def steps(*numbers: int) -> str:
    """Return the calls of a program that trains for these steps."""
    return ", ".join(f"deal {number} all, update" for number in numbers)


def named() -> dict[str, nn.Parameter]:
    """Return the parameters of a toy, by name."""
    return dict(TOYS[TOY].build(SEED).named_parameters())


def in_ranks(ctx: Context, script: Script, scene: str) -> oracle.Named:
    """Rank body: the script with the sharded optimizer."""
    return script(Divided(ctx, scene))


def same_as_unsharded(world: World, script: Script, scene: str) -> None:
    """On every rank the script must see what it sees with the plain optimizer."""
    __tracebackhide__ = True
    like_unsharded(world.run(in_ranks, script, scene), script, scene)


def like_unsharded(ranks: Sequence[oracle.Named], script: Script, scene: str) -> None:
    """As above, for what ranks have seen already."""
    __tracebackhide__ = True
    judge.tensors(
        ranks,
        script(Stepped(scene)),
        quantity="weight that the unsharded optimizer gives",
        within=within_steps(Scene.of(scene), torch.float32, depth=8),
        hints=[Hint(FAULTS["deaf"], lambda: script(Stepped(scene, "deaf")))],
        given=scene,
    )


def wide(width: int = WIDTH) -> nn.Sequential:
    """A float32 model whose parameters are large beside any padding."""
    torch.manual_seed(SEED)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(DEPTH)])


def state_bytes(
    ctx: Context, model: Callable[[], nn.Module], *, load: bool = False, adds: bool = False
) -> int:
    """Bytes of AdamW's state on this rank, in whichever object the optimizer keeps it.

    That is what two steps of AdamW leave behind, less what two of SGD do, which has no state: flat
    copies of the parameters and bookkeeping are the same in both.

    Args:
        load: continue from the unsharded optimizer's state dict.
        adds: construct with the first parameter; each of the others is a group that is added.
    """
    adamw, sgd = (_bytes_left(ctx, model(), kind, load, adds) for kind in ("adamw", "sgd"))
    return adamw - sgd


def _bytes_left(ctx: Context, model: nn.Module, optimizer: str, load: bool, adds: bool) -> int:
    kind, options = OPTIMIZERS[optimizer]
    unsharded = kind(model.parameters(), **options)
    if load:
        step_on_ones(model, unsharded)
    saved = unsharded.state_dict()
    with ctx.recording() as recorder:
        first, *others = ([p] for p in model.parameters()) if adds else (model.parameters(),)
        made = ctx.impl.sharded_optimizer(first, kind, **options)
        for group in others:
            made.add_param_group({"params": group})
        if load:  # copies that an operator makes: what the recorder sees as new
            state = {n: {k: v.clone() for k, v in e.items()} for n, e in saved["state"].items()}
            made.load_state_dict({**saved, "state": state})
            del state
        for _ in range(2):
            step_on_ones(model, made)
        # Cycles die in both runs, or in neither.
        return footprint.settled(recorder, looks=10, pause_s=0.01)


def step_on_ones(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take a step where every trained parameter has a gradient of ones."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
