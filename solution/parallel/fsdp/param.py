"""A parameter in its two forms: the shard that the optimizer updates, and the unsharded tensor.

Both exist as one Parameter object each for as long as the model lives:

    sharded     a DTensor with this rank's rows; what `parameters()`, optimizers and state dicts see
    unsharded   a plain tensor, registered in the module only while the module computes; a leaf, so
                autograd leaves the local gradient in its `.grad`

Freeing `unsharded` empties its storage and keeps the object: what autograd saved for backward are
views of that storage, and find the values again when the all-gather in backward has filled it. Its
memory is written through another tensor on the same storage, whose version counter is another one,
so that autograd does not take an all-gather for a modification.

A gradient is on its way from `unsharded.grad` to `sharded.grad`, the mean. In between it is
`unreduced` (a sum of local gradients, n elements), `is_in_flight` (in the buffer of a
reduce-scatter, n), or `partial` (this rank's rows of a sum over shards and not over replicas):

    pre-backward    resume       autograd adds to an unreduced sum of earlier micro-batches
    post-backward   accumulate   the local gradient is taken from autograd
                    send         a reduce-scatter is started (`unit.py`)
    its end         forget       no rank had a gradient
                    keep         HSDP, replicas not averaged yet: this rank's rows of the sum stay
                    add          this rank's rows of the mean are added to `sharded.grad`
    zero_grad       drop         also after an interrupted backward

`zero_grad` must discard what is not in `sharded.grad` yet. So between backwards `sharded.grad` is a
*placeholder* for it: zeros in the memory of one element, or the gradient that was there before. If
the user replaced or zeroed the placeholder, the gradient counts as cleared and is dropped. The
version shows that it was written to. An optimizer with `foreach` or `fused` moves no version when
it zeroes DTensors, but it calls `requires_grad_(False)` on each of them, as every `zero_grad` does.

PyTorch counterpart: `FSDPParam`, which keeps the unsharded tensor registered after a forward.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from solution.parallel.fsdp.options import ShardingMesh

Place = tuple[nn.Module, str]  # where a Parameter is registered


def rows_of(num_rows: int, rank: int, num_ranks: int) -> slice:
    """Return the rows of rank `rank` of `num_ranks`: piece `rank` of `torch.chunk`, or none.

    >>> [rows_of(4, rank, 3) for rank in range(3)]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 4, None)]
    """
    length = -(-num_rows // num_ranks)
    return slice(min(rank * length, num_rows), min((rank + 1) * length, num_rows))


class ShardedParameter:
    """A parameter cut along dim 0."""

    def __init__(
        self, name: str, parameter: nn.Parameter, places: Sequence[Place], mesh: ShardingMesh
    ) -> None:
        self.name = name
        self.places = places  # all modules and names that it has; several if it is tied
        self.shape = parameter.shape  # of the unsharded tensor
        rows = rows_of(parameter.shape[0], mesh.rank, mesh.num_shards)
        self.sharded = nn.Parameter(
            DTensor.from_local(
                parameter.detach()[rows].clone(),
                mesh.mesh,
                mesh.placements,
                run_check=False,
                shape=parameter.shape,  # not W times the local one: rows need not divide
                stride=parameter.stride(),
            ),
            requires_grad=parameter.requires_grad,
        )
        self.unsharded: nn.Parameter | None = None  # before the first all-gather
        self.is_in_flight = False  # whether a reduction of it has started and not ended
        self.unreduced: torch.Tensor | None = None  # sum of local gradients, `[shape]`
        self.partial: torch.Tensor | None = None  # own rows, not summed over replicas yet
        self._memory = torch.empty(0)
        self._seen: Callable[[], torch.Tensor | None] = lambda: None  # the latest `local`
        self._num_locals = 0
        self._placeholder: _Placeholder | None = None
        self._is_placeholder_zeros = False
        self._register(self.sharded)

    # ------------------------------------------------------------------------------------ values

    @property
    def local(self) -> torch.Tensor:
        """This rank's rows, also of a Parameter that `load_state_dict(assign=True)` put here.

        Raises:
            ValueError: what was put here is no DTensor of this shape and placement.
        """
        self._adopt()
        return self.sharded._local_tensor  # type: ignore[attr-defined]  # a DTensor

    def versions(self) -> tuple[int, int, int]:
        """Return a value that changes with the shard, in place too."""
        local = self.local
        if self._seen() is not local:  # an id may come again, on one rank and not on another
            self._seen, self._num_locals = weakref.ref(local), self._num_locals + 1
        return self._num_locals, self.sharded._version, local._version

    @property
    def trains_alike(self) -> bool:
        """Whether the unsharded tensor, if there is one, requires a gradient as the shard does."""
        return self.unsharded is None or self.unsharded.requires_grad == self.sharded.requires_grad

    def allocate(self, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised memory `[shape]` for the unsharded values, to be written to."""
        device, requires_grad = self.local.device, self.sharded.requires_grad
        tensor = self.unsharded
        if tensor is None or tensor.dtype != dtype or tensor.device != device:
            self._memory = torch.empty(self.shape, dtype=dtype, device=device)
            # `.data`: the same storage with a version counter of its own.
            self.unsharded = nn.Parameter(self._memory.data, requires_grad=requires_grad)
        else:
            self._memory.untyped_storage().resize_(self._memory.nbytes)
            if tensor.requires_grad != requires_grad:  # no transform of torch.func allows the call
                tensor.requires_grad_(requires_grad)
        return self._memory

    def free(self) -> None:
        """Free the memory of the unsharded values, under whatever views of it exist."""
        self._memory.untyped_storage().resize_(0)

    def register_unsharded(self) -> None:
        """Let the module compute with the unsharded tensor."""
        self._register(self.unsharded)

    def register_sharded(self) -> None:
        """Let the module, and whoever asks it for parameters, see the shard."""
        self._adopt()
        self._register(self.sharded)

    def _register(self, parameter: nn.Parameter | None) -> None:
        for module, name in self.places:
            module._parameters[name] = parameter

    def _adopt(self) -> None:
        # load_state_dict(assign=True) puts other Parameters into the modules.
        for module, name in self.places:
            registered = module._parameters[name]
            if registered is not self.sharded and registered is not self.unsharded:
                break
        else:
            return
        expected, found = _layout(self.sharded), _layout(registered)
        if not isinstance(registered, DTensor) or found != expected:
            self._register(self.sharded)  # so that the right ones can still be loaded
            raise ValueError(
                f"expected {self.name!r} to stay a DTensor of {expected}, got {found} in its "
                "place, which is discarded; load sharded values, or copy in place"
            )
        self.sharded = registered
        self._register(registered)

    # --------------------------------------------------------------------------------- gradients

    @property
    def has_local_gradient(self) -> bool:
        """Whether a backward has left a gradient that is not taken yet."""
        return self.unsharded is not None and self.unsharded.grad is not None

    @property
    def is_trained(self) -> bool:
        """Whether a backward of the last forward could reach it."""
        return self.unsharded is not None and self.unsharded.requires_grad

    @property
    def has_unsent(self) -> bool:
        """Whether a sum waits for a reduction: of local gradients, or over shards alone."""
        waits = self.unreduced is not None or self.partial is not None
        return waits and not self.is_in_flight

    def resume(self) -> None:
        """Let autograd add to the unreduced gradient, if dtypes allow: it frees its own sooner."""
        assert self.unsharded is not None
        if self.unreduced is not None and self.unreduced.dtype == self.unsharded.dtype:
            self.unsharded.grad, self.unreduced = self.unreduced, None

    def accumulate(self, dtype: torch.dtype | None, *, sends_partial: bool) -> None:
        """Add `unsharded.grad` to `unreduced`, which has `dtype`, or that of the first gradient.

        Without a gradient `unreduced` becomes zeros if a partial sum has to be sent with it.
        """
        if self.unsharded is not None and self.unsharded.grad is not None:
            assert not self.is_in_flight
            gradient, self.unsharded.grad = self.unsharded.grad.detach(), None
            if self.unreduced is None:
                # contiguous: a gradient may be a transposed or an expanded view.
                self.unreduced = gradient.to(dtype or gradient.dtype).contiguous()
            else:
                self.unreduced += gradient
        elif sends_partial and self.has_unsent and self.unreduced is None:
            assert self.partial is not None
            self.unreduced = self.partial.new_zeros(self.shape)

    def send(self) -> None:
        """Forget the unreduced gradient, and its placeholder: a message holds it now."""
        assert not self.is_in_flight
        self.is_in_flight, self.unreduced = True, None
        self.remove_placeholder()

    def forget(self) -> None:
        """Stay without a gradient: no rank has sent one."""
        self.is_in_flight = False

    def keep(self, rows: torch.Tensor) -> None:
        """Keep this rank's rows of a sum that later reductions average over replicas."""
        self.is_in_flight, self.partial = False, rows

    def add(self, rows: torch.Tensor) -> None:
        """Add this rank's rows of a mean to `sharded.grad`.

        The first gradient is not copied: it stays a view of the mean of its whole message.
        """
        assert self.is_in_flight
        self.is_in_flight, self.partial = False, None
        if self.sharded.grad is not None:
            self.sharded.grad._local_tensor.add_(rows)  # type: ignore[attr-defined]  # a DTensor
        else:
            self.sharded.grad = self._as_gradient(rows)
        hooks = self.sharded._post_accumulate_grad_hooks  # type: ignore[attr-defined]  # torch's
        for hook in list((hooks or {}).values()):
            hook(self.sharded)

    def drop(self) -> None:
        """Discard every gradient that is not in `sharded.grad`."""
        self.is_in_flight = False
        if self.unsharded is not None:
            self.unsharded.grad = None
        self.unreduced = self.partial = None
        self.remove_placeholder()

    # ------------------------------------------------------------------------------- placeholder

    def leave_placeholder(self) -> None:
        """Make `zero_grad` discard what is not in `sharded.grad` yet."""
        if not (self.is_in_flight or self.has_unsent):
            return
        if self.sharded.grad is None:
            zero = torch.zeros((), dtype=self.local.dtype, device=self.local.device)
            self.sharded.grad = self._as_gradient(zero.expand(self.local.shape))
            self._is_placeholder_zeros = True
        self._placeholder = _Placeholder(self.sharded.grad)

    def remove_placeholder(self) -> bool:
        """Remove the placeholder, if there is one; return whether the user has cleared it."""
        is_cleared = self._is_cleared()
        if self._placeholder is not None:
            del self._placeholder.gradient.requires_grad_
            if self._is_placeholder_zeros and self.sharded.grad is self._placeholder.gradient:
                self.sharded.grad = None
        self._placeholder, self._is_placeholder_zeros = None, False
        return is_cleared

    def drop_if_cleared(self) -> None:
        """Drop what is not in `sharded.grad` if the user has cleared the placeholder."""
        if self._is_cleared():
            self.drop()

    def _is_cleared(self) -> bool:
        placeholder = self._placeholder
        if placeholder is None:
            return False
        return self.sharded.grad is not placeholder.gradient or placeholder.is_zeroed

    def _as_gradient(self, rows: torch.Tensor) -> DTensor:
        # As `DTensor.from_local`, with the spec that the parameter has already.
        spec = self.sharded._spec  # type: ignore[attr-defined]  # a DTensor
        return DTensor(rows, spec, requires_grad=False)


class _Placeholder:
    """Watches a gradient for `zero_grad`, as the module's docstring says."""

    def __init__(self, gradient: torch.Tensor) -> None:
        self.gradient = gradient
        self._versions = _versions(gradient)
        self._calls: list[bool] = []
        # An attribute of the object comes before the method. Weak: it must not keep itself alive.
        hidden = partial(_requires_grad_, weakref.ref(gradient), self._calls)
        gradient.requires_grad_ = hidden  # type: ignore[method-assign]  # until it is deleted

    @property
    def is_zeroed(self) -> bool:
        return False in self._calls or _versions(self.gradient) != self._versions


def _requires_grad_(
    gradient: Callable[[], Any], calls: list[bool], requires_grad: bool = True
) -> torch.Tensor:
    calls.append(requires_grad)
    return torch.Tensor.requires_grad_(gradient(), requires_grad)


def _layout(parameter: object) -> object:
    if not isinstance(parameter, DTensor):
        return type(parameter).__name__
    return tuple(parameter.shape), parameter.placements, parameter.device_mesh


def _versions(gradient: torch.Tensor) -> tuple[int, int]:
    return gradient._version, gradient._local_tensor._version  # type: ignore[attr-defined]  # a DTensor
