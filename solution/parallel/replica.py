"""The shared base class of the data-parallel wrappers: a module that starts equal and stays equal.

Problem. W ranks hold the same model and each sees other data. If all of them start from the same
values and step with the same gradient, they stay the same without ever comparing. If they start
from unequal ones, they stay unequal, with a loss that falls all the same.

1. At construction all ranks compare names, shapes, dtypes and what is frozen (`agreement.py`): with
   different models they would send messages of different sizes, and hang or mix them up.
2. Then they take the first rank's values, of frozen parameters and buffers too, since these shape
   every gradient.
3. During backward, and in `finish_gradient_synchronization`, gradients become means
   (`reducer.py`); a subclass chooses the reducer.
4. Buffers are changed by the forward itself (running statistics), from each rank's own data. So a
   training forward outside `no_sync` takes the first rank's before it starts.

Cost. Nothing per step beyond the reducer's, but one broadcast for a model that has buffers. At
construction one collective of 16 bytes, and the values once (`agreement.py`).

Paper: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
sections 3.1 and 4.1. PyTorch counterpart: `DistributedDataParallel`, which waits by itself at the
end of backward where this waits in `finish_gradient_synchronization`, decides in the forward
whether a backward is reduced where this decides in the backward, compares shapes only, and sends
one broadcast for each dtype. With both, backwards of `module` called alone stay local.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import nn

from solution import comm
from solution.parallel.agreement import on_all_ranks, send_values
from solution.parallel.reducer import Reducer


class Replica(nn.Module):
    """This rank's copy of a model whose gradients are averaged over a process group.

    `module` keeps its Parameter objects; a `process_group` of None is the default group.
    """

    module: nn.Module
    _reducer: Reducer  # set by the subclass when this constructor has returned

    def __init__(
        self, module: nn.Module, *, options: tuple[object, ...], process_group: comm.Group
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"expected an nn.Module to wrap, got {type(module).__name__}")
        name = type(self).__name__
        comm.require_group(process_group, caller=name)

        def describe() -> Iterator[str]:
            _require_replicable(module)
            yield f"{name} with options {options}"
            for where, tensor in (*module.named_parameters(), *module.named_buffers()):
                kind = f"{tuple(tensor.shape)} {tensor.dtype}"
                yield f"{where!r}: {kind}, requires_grad={tensor.requires_grad}"

        expected = "the same module on all ranks (names, shapes, dtypes, what is frozen)"
        on_all_ranks(describe, [process_group], expected=f"{expected} and the same wrapper")
        self.module = module
        self.process_group = process_group
        named = list(module.named_parameters())
        self._trainable = [(name, p) for name, p in named if p.requires_grad]
        self._frozen = [(name, p) for name, p in named if not p.requires_grad]
        # Places, not tensors: a forward may put another tensor in a buffer's place.
        self._buffer_places = [
            (owner, name)
            for owner in module.modules()
            for name, _ in owner.named_buffers(recurse=False)
        ]
        send_values([p for _, p in named] + self._present_buffers(), 0, process_group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; in training outside `no_sync`, on the first rank's buffers."""
        self._before_forward()
        return self.module(*args, **kwargs)

    @torch._disable_dynamo  # so that a compiled forward is one graph: the module's
    def _before_forward(self) -> None:
        if self._reducer.begin():
            self._require_frozen()
            if self._reducer.is_sending and self.module.training:
                send_values(self._present_buffers(), 0, self.process_group)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context for forward and backward: `.grad` is a local sum, nothing is sent."""
        return self._reducer.no_sync()

    def finish_gradient_synchronization(self) -> None:
        """Return when `.grad` is the mean over the group; a second call changes nothing.

        Call it once after every backward outside `no_sync`, before the optimizer.

        Raises:
            RuntimeError: inside `no_sync`, or when the backward before it was interrupted.
        """
        if not self._reducer.is_sending:
            raise RuntimeError(
                "finish_gradient_synchronization was called inside no_sync, where nothing is sent; "
                "call it after the last micro-batch, whose forward and backward are outside"
            )
        if self._reducer.is_in_backward:
            self._reducer.abandon()
            raise RuntimeError(
                f"rank {comm.rank(self.process_group)}: the backward before this call was "
                "interrupted by an exception; its gradients are dropped, run the step again"
            )
        self._reducer.finish()

    def __getstate__(self) -> NoReturn:
        """Refuse to be copied: the copy's parameters would have no hooks, and train alone."""
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled; copy its `.module`, or save its "
            "state_dict"
        )

    def _require_frozen(self) -> None:
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise RuntimeError(
                    f"{name!r} was frozen when the module was wrapped and requires a gradient now, "
                    "which nothing would reduce; wrap after choosing what is trained"
                )

    def _present_buffers(self) -> list[torch.Tensor]:
        present = (owner._buffers[name] for owner, name in self._buffer_places)
        return [buffer for buffer in present if buffer is not None]


def _require_replicable(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter) or parameter.is_meta:
            raise ValueError(f"expected {name!r} to have values, got none; materialise it first")
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise NotImplementedError(f"expected dense gradients, got sparse=True in {name!r}")
