"""The contract of a trainer: an implementation that owns forward, backward and optimizer step.

DeepSpeed, a Hugging Face trainer or a loop of one's own fit no wrapper's contract: one hands them a
module and micro-batches, and reads weights afterwards. The expected weights come from one process
that sees all micro-batches of all ranks.
"""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

Named = Iterable[tuple[str, nn.Parameter]]
Loss = Callable[[nn.Module, Any], torch.Tensor]


class MakeOptimizer(Protocol):
    """Which optimizer to use; called with the named parameters it builds one.

    Attributes:
        cls: the class, such as `torch.optim.AdamW`.
        options: its keyword arguments; every option that changes arithmetic is given.
    """

    cls: type[Optimizer]
    options: dict[str, Any]

    def __call__(self, named_parameters: Named) -> Optimizer:
        """Return `cls(groups(named_parameters), **options)`."""

    def groups(self, named_parameters: Named) -> list[dict[str, Any]]:
        """Return the parameter groups, by the plain model's names (after a `module.`, if any)."""


class Trainer(Protocol):
    """What a `build_*trainer` function returns. All ranks of the group call each of its methods.

    `evaluate`, `set_lr`, `save` and `load` may be absent: then they are not judged. `declares`, an
    optional mapping, names choices that differ from the default. The values:

        "unused"     "none" (default): the optimizer skips a trainable parameter without a gradient
                     on all ranks. "zero": it is updated with a gradient of zeros.
        "gradient"   "mean" (default): the ranks' gradients are averaged. "sum": they are added.
        "start"      "first-rank" (default): where ranks begin with unequal weights, those of the
                     group's first rank count. "own": the caller must seed all ranks alike.
    """

    def step(self, micro_batches: Sequence[Any]) -> Any:
        """Take one optimizer step on `accumulation` micro-batches of this rank.

        Returns:
            The mean of this rank's losses, or of all ranks', or None.

        Level `correct`:
            one-process: Weights become those of one process with all ranks' micro-batches.
            loss: A returned loss is the mean of this rank's micro-batches, or of all ranks'.
        """

    def evaluate(self, batch: Any) -> Any:
        """Return the loss of `batch` on this rank with the current weights.

        Level `correct`:
            current: The loss is this rank's, with the current weights.
            inert: An evaluation changes nothing.
            mode: The module is in evaluation mode meanwhile, and no gradient is computed.
            restores: Afterwards each part of the module is in the mode in which it was.
        """

    def full_parameters(self) -> Mapping[str, torch.Tensor]:
        """Return the current weights, frozen ones too, whole and in float32.

        A tied weight may be there under its other names as well. The suite copies what it gets, and
        does not look at buffers.

        Level `correct`:
            plain-names: Names are those of the plain model's `named_parameters()`.
            inert: Reading weights changes nothing.
        """

    def set_lr(self, factor: float) -> None:
        """Set the rate of every parameter group to `factor` times its initial rate.

        The initial rate is that of `make_optimizer`, also after a `load`.

        Level `correct`:
            next-step: The rate counts from the next step on.
            every-group: Every group has `factor` times its own initial rate.
        """

    def save(self, directory: str | PathLike[str]) -> None:
        """Write weights and optimizer state below `directory`, which is empty or absent.

        Level `correct`:
            inert: Saving changes nothing that is trained afterwards.
            on-return: When it returns on any rank, every rank can load.
        """

    def load(self, directory: str | PathLike[str]) -> None:
        """Replace weights and optimizer state by what `save` wrote, whatever was there before.

        Learning rates after a load are not judged: the caller sets them by `set_lr`.

        Level `correct`:
            replaces: Training goes on from what was saved.
        """


def build_trainer(
    module: nn.Module,
    make_optimizer: MakeOptimizer,
    *,
    loss: Loss,
    accumulation: int = 1,
    max_norm: float | None = None,
    dtype: torch.dtype = torch.float32,
    process_group: ProcessGroup | None = None,
) -> Trainer:
    """Build a trainer around `module` with this implementation's strategy.

    Args:
        module: its parameters are float32.
        loss: `loss(model, micro_batch)` calls the model that it is given as the plain module would
            be called, and returns a scalar.
        accumulation: the number of micro-batches of a step.
        max_norm: each step's gradient is clipped to this global norm; None clips nothing.
        dtype: a forward computes in it: float32 or bfloat16.
        process_group: the ranks that take part; None means the default group.

    Raises:
        NotImplementedError: an optimizer or an option that this trainer does not take; raised here
            and not by a later call.

    Level `correct`:
        mean-gradient: A step's gradient is the mean over its micro-batches and the group's ranks.
        first-weights: Ranks begin with the first rank's weights, unless "start" declares "own".
        clips-once: With `max_norm` a step's gradient is clipped once, by its global norm.
        no-clipping: With a `max_norm` of None nothing is clipped.
        bfloat16: A forward in bfloat16 trains as one in float32, within its rounding.
        float32-state: Weights and optimizer state that are updated stay float32.
        own-group: A trainer trains on the micro-batches of its group alone.
        options: Every parameter group is updated with its own options.
        tied: A tied parameter is trained as one parameter.
        reused: A module that a forward calls twice is trained right.
        frozen: A frozen parameter stays as it is.
        unused: An unused parameter is treated as `declares` says.
        trainers-apart: Several trainers in one process do not disturb each other.
        equal-ranks: All ranks hold the same bits after a step, also where gradients are not finite.
        equal-runs: Equal runs give equal bits.
        no-growth: Memory between steps does not grow from step to step.
        declares: `declares` names choices and values that `Trainer` lists.

    Level `production`:
        one-reduction: Gradients are reduced once per step.
        silent-evaluation: An evaluation reduces no gradient.
        products: Products are computed in `dtype`.

    May be refused:
        unused-somewhere: A parameter that some ranks leave unused.
        unused-early: A parameter that some micro-batches leave unused.
        layouts: A parameter that is not contiguous in memory.
        frozen-later: A parameter that is frozen after construction.
        thawed-later: A parameter that is thawed after construction.
        other-number: A number of micro-batches other than `accumulation`, the same on all ranks.
        after-exception: The step after an exception that all ranks raised at one point and caught.
        other-world: A checkpoint that another number of ranks loads.
        not-finite: A gradient that is not finite.
    """


def build_zero1_trainer(
    module: nn.Module,
    make_optimizer: MakeOptimizer,
    *,
    loss: Loss,
    accumulation: int = 1,
    max_norm: float | None = None,
    dtype: torch.dtype = torch.float32,
    process_group: ProcessGroup | None = None,
) -> Trainer:
    """As `build_trainer`, with the optimizer's state divided over the ranks.

    Level `correct`:
        state-divided: A rank's state is at most its share plus that of the largest parameter.
    """


def build_fsdp_trainer(
    module: nn.Module,
    make_optimizer: MakeOptimizer,
    *,
    loss: Loss,
    accumulation: int = 1,
    max_norm: float | None = None,
    dtype: torch.dtype = torch.float32,
    process_group: ProcessGroup | None = None,
) -> Trainer:
    """As `build_zero1_trainer`, with gradients and parameters divided as well.

    All ranks must call the same modules in the same order, since every call gathers on all ranks.

    Level `correct`:
        parameters-divided: A rank holds no more than its share of parameters and gradients.
    """
