"""What both kinds of data-parallel wrapper share: a module that starts equal and stays equal.

Problem. W ranks hold the same model and each sees other data. If all of them start from the same
values and step with the same gradient, they stay the same without ever comparing: no parameter
is sent again after construction.

1. At construction all ranks take the first rank's parameters, frozen ones too, and buffers
   (`equal_start.py`).
2. During backward, and in `finish_gradient_synchronization`, gradients become means
   (`reducer.py`); a subclass brings the reducer.
3. Buffers are changed by the forward itself (running statistics), from each rank's own data. So a
   training forward outside `no_sync` takes the first rank's before it starts.

Cost. Nothing per step beyond the reducer's, but one broadcast for a model that has buffers.

Paper: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
sections 3.1 and 4.1. PyTorch counterpart: `DistributedDataParallel`, which waits by itself at the
end of backward where this waits in `finish_gradient_synchronization`, and which decides in the
forward whether a backward is reduced where this decides in the backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from solution import comm
from solution.parallel import equal_start
from solution.parallel.reducer import Reducer, is_inside_backward


class Replica(nn.Module):
    """This rank's copy of a model whose gradients are averaged over a process group.

    Attributes:
        module: the wrapped model, with its original Parameter objects.
    """

    module: nn.Module
    _reducer: Reducer  # set by the subclass when this constructor has returned

    def __init__(
        self, module: nn.Module, *, options: tuple[object, ...], process_group: comm.Group
    ) -> None:
        super().__init__()
        equal_start.require_replicable(module)
        comm.require_group(process_group, caller=type(self).__name__)
        options = (type(self).__name__, *options)
        equal_start.require_same_module(module, options, process_group)
        self.module = module
        self._group = process_group
        named = list(module.named_parameters())
        self._trainable = [(name, p) for name, p in named if p.requires_grad]
        self._frozen = [(name, p) for name, p in named if not p.requires_grad]
        # Places, not tensors: a forward may put another tensor in a buffer's place.
        self._buffer_places = [
            (owner, name)
            for owner in module.modules()
            for name, _ in owner.named_buffers(recurse=False)
        ]
        equal_start.take_first_ranks([p for _, p in named] + self._present_buffers(), self._group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's; when it trains outside `no_sync`, on the first rank's buffers."""
        # A forward that activation checkpointing repeats inside backward is not a new one.
        if torch.is_grad_enabled() and not is_inside_backward():
            self._before_training_forward()
        return self.module(*args, **kwargs)

    @property
    def process_group(self) -> comm.Group:
        """The group over which gradients are averaged; None is the default group."""
        return self._group

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around forward and backward: `.grad` holds plain local sums and nothing is sent."""
        previous = self._reducer.is_sending
        self._reducer.is_sending = False
        try:
            yield
        finally:
            self._reducer.is_sending = previous

    def finish_gradient_synchronization(self) -> None:
        """Returns when `.grad` is the mean over the group; a second call changes nothing.

        Called once after every backward outside `no_sync`, before the optimizer.

        Raises:
            RuntimeError: inside `no_sync`, or when the backward before it was interrupted.
        """
        if not self._reducer.is_sending:
            raise RuntimeError(
                "finish_gradient_synchronization was called inside no_sync, where nothing is sent; "
                "call it after the last micro-batch, whose forward and backward are outside"
            )
        if self._reducer.is_interrupted:
            self._reducer.abandon()
            raise RuntimeError(
                f"rank {comm.rank(self._group)}: the backward before this call was interrupted by "
                "an exception; its gradients are dropped, run the step again"
            )
        self._reducer.finish()

    def __getstate__(self) -> NoReturn:
        """Refuses: a copy would have parameters without hooks, and train alone without a word."""
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled; copy its `.module`, or save its "
            "state_dict"
        )

    def _before_training_forward(self) -> None:
        self._reducer.begin()
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise RuntimeError(
                    f"{name!r} was frozen when the module was wrapped and requires a gradient now, "
                    "which nothing would reduce; wrap after choosing what is trained"
                )
        if self._reducer.is_sending and self.module.training:
            equal_start.take_first_ranks(self._present_buffers(), self._group)

    def _present_buffers(self) -> list[torch.Tensor]:
        present = (owner._buffers[name] for owner, name in self._buffer_places)
        return [buffer for buffer in present if buffer is not None]
