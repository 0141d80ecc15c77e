"""The contract of a trainer: an implementation that owns forward, backward and optimizer step.

DeepSpeed, a Hugging Face trainer or a loop of one's own fit no wrapper's contract: one hands them a
module and micro-batches, and reads weights afterwards. What they are compared with is one process
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

        The weights become those that one process gets from the micro-batches of all ranks. Returns
        the mean of this rank's losses, or of all ranks', or None.
        """

    def evaluate(self, batch: Any) -> Any:
        """Return the loss of `batch` on this rank with the current weights; change nothing.

        The module is in evaluation mode meanwhile, no gradient is computed, and afterwards the
        module is in the mode in which it was.
        """

    def full_parameters(self) -> Mapping[str, torch.Tensor]:
        """Return the current weights, frozen ones too, whole and in float32.

        Names are those of the plain model's `named_parameters()`; a tied weight may be there under
        its other names as well. The suite copies what it gets; buffers are not looked at.
        """

    def set_lr(self, factor: float) -> None:
        """From the next step on use `factor` times the initial rate of every parameter group.

        The initial rate is that of `make_optimizer`, also after a `load`.
        """

    def save(self, directory: str | PathLike[str]) -> None:
        """Write weights and optimizer state below `directory`, which is empty or absent.

        When it returns on any rank, every rank can load.
        """

    def load(self, directory: str | PathLike[str]) -> None:
        """Replace weights and optimizer state by what `save` wrote, whatever was there before."""


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
    """A trainer around `module`, whose parameters are float32, with this implementation's strategy.

    `loss(model, micro_batch)` calls the model that it is given as the plain module would be called
    and returns a scalar. The gradient of a step is the mean over the step's micro-batches and the
    group's ranks. With `max_norm` it is clipped once per step, by the global norm of that mean; a
    `max_norm` of None clips nothing. A forward computes in `dtype`, float32 or bfloat16; weights
    and optimizer state that are updated stay float32.

    Tied, reused, frozen and unused parameters are right. In the following cases a trainer gives the
    right result or raises; it does not hang, and it does not train something else without an error:

    - parameters that some ranks or micro-batches leave unused
    - parameters that are not contiguous in memory
    - parameters that are frozen or thawed after construction
    - another number of micro-batches than `accumulation`, the same on all ranks
    - the step after an exception that all ranks raised at the same point, and caught
    - a checkpoint that another number of ranks loads

    Several trainers in one process do not disturb each other. All ranks hold the same bits after a
    step, also where a gradient is not finite, and equal runs give equal bits.

    Level `production`: gradients are reduced once per step, an evaluation reduces none, and
    products are computed in `dtype`.
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
    """As `build_trainer`, with the optimizer's state divided over the ranks."""


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
    """As `build_trainer`, with state, gradients and parameters divided over the ranks.

    All ranks call the same modules in the same order: what a rank leaves out, the others gather.
    """
