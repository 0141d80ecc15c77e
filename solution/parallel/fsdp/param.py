"""One parameter: the shard that the optimizer knows, and the full tensor that computes.

Both exist as one Parameter object each for as long as the model lives:

    sharded   a DTensor with this rank's rows; what `parameters()`, optimizers and state dicts see
    full      a plain tensor, registered in the module only while the module computes; a leaf, so
              autograd leaves the local gradient in its `.grad`

Freeing `full` empties its storage and keeps the object: what autograd saved for backward are views
of that storage, and find the values again when a gather in backward has filled it. Its memory is
written through another tensor on the same storage, whose version counter is another one, so that
autograd does not take a gather for a modification.

A local gradient that is not reduced yet is *pending*. It is kept here, as large as the parameter,
while `sharded.grad` has room for the shard's part only; and yet `zero_grad` must discard it. So
`sharded.grad` holds a *token* meanwhile: zeros in the memory of one element, or the gradient that
was there before. Who replaces or zeroes the token has cleared the gradient, and what was pending is
dropped; anything else that writes to the zeros is an error, since it would be lost.

PyTorch counterpart: `FSDPParam`. There the full tensor stays registered after a forward that keeps
it, so an optimizer built then trains nothing; and `zero_grad` does not reach what is pending.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from solution.parallel.fsdp.grid import Grid
from solution.parallel.fsdp.layout import rows_of

Place = tuple[nn.Module, str]  # where a Parameter is registered


class ShardedParameter:
    """A parameter cut along dim 0.

    Attributes:
        name: in the sharded module.
        places: all modules and names under which it is registered; several if it is tied.
        shape: of the full tensor.
        sharded: the DTensor Parameter, this rank's rows.
        full: the plain Parameter; None before the first gather, without memory while freed.
        pending: the sum of local gradients since the last reduction, in the full shape.
        partial: this rank's rows of what was added up over shards, and not yet over replicas.
    """

    def __init__(
        self, name: str, parameter: nn.Parameter, places: Sequence[Place], grid: Grid
    ) -> None:
        self.name = name
        self.places = places
        self.shape = parameter.shape
        rows = rows_of(parameter.shape[0], grid.rank, grid.num_ranks)
        self.sharded = nn.Parameter(
            DTensor.from_local(
                parameter.detach()[rows].clone(),
                grid.mesh,
                grid.placements,
                run_check=False,
                shape=parameter.shape,  # not W times the local one: rows need not divide
                stride=parameter.stride(),
            ),
            requires_grad=parameter.requires_grad,
        )
        self.full: nn.Parameter | None = None
        self.pending: torch.Tensor | None = None
        self.partial: torch.Tensor | None = None
        self._memory = torch.empty(0)
        self._token: tuple[torch.Tensor, tuple[int, int]] | None = None
        self._is_token_ours = False
        self.register_sharded()

    # ------------------------------------------------------------------------------------ values

    @property
    def local(self) -> torch.Tensor:
        """This rank's rows; whatever was done to the module since, these are what counts."""
        module, name = self.places[0]
        registered = module._parameters[name]
        if registered is not self.sharded and registered is not self.full:
            self._adopt(registered)
        return self.sharded._local_tensor  # type: ignore[attr-defined]  # a DTensor

    def versions(self) -> tuple[int, int, int]:
        """Something else after every in-place change of the Parameter or of its local tensor."""
        local = self.local
        return id(local), self.sharded._version, local._version

    def allocate(self, dtype: torch.dtype) -> torch.Tensor:
        """Memory `[shape]` for the full values, to be written to; what it holds is undefined."""
        device = self.local.device
        if self.full is None or self.full.dtype != dtype or self.full.device != device:
            self._memory = torch.empty(self.shape, dtype=dtype, device=device)
            # `.data`: the same storage with a version counter of its own.
            self.full = nn.Parameter(self._memory.data, requires_grad=self.sharded.requires_grad)
        else:
            self._memory.untyped_storage().resize_(self._memory.nbytes)
            self.full.requires_grad_(self.sharded.requires_grad)
        return self._memory

    def free(self) -> None:
        """Give the memory of the full values back, under whatever views of it exist."""
        self._memory.untyped_storage().resize_(0)

    def register_full(self) -> None:
        """Let the module compute with the full tensor."""
        for module, name in self.places:
            module._parameters[name] = self.full

    def register_sharded(self) -> None:
        """Let everybody see the shard."""
        for module, name in self.places:
            module._parameters[name] = self.sharded

    def _adopt(self, registered: nn.Parameter | None) -> None:
        # load_state_dict(assign=True) puts another Parameter into the module's first place.
        if not isinstance(registered, DTensor) or registered.shape != self.shape:
            raise ValueError(
                f"expected {self.name!r} to stay a DTensor of shape {tuple(self.shape)}, got "
                f"{type(registered).__name__} in its place; load sharded values, or copy in place"
            )
        self.sharded = registered
        self.register_sharded()

    # --------------------------------------------------------------------------------- gradients

    def take_gradient(self, dtype: torch.dtype | None) -> None:
        """Move what a backward left in `full.grad` to `pending`, in `dtype`."""
        if self.full is None or self.full.grad is None:
            return
        gradient, self.full.grad = self.full.grad.detach(), None
        if self.pending is None:
            # contiguous: a gradient may be a transposed or an expanded view.
            self.pending = gradient.to(dtype or gradient.dtype).contiguous()
        else:
            self.pending += gradient

    def resume_gradient(self) -> None:
        """Let autograd add to what is pending, where it has one dtype with what comes.

        Each gradient is then freed as soon as it is added, not when its unit's backward is over.
        """
        assert self.full is not None
        if self.pending is not None and self.pending.dtype == self.full.dtype:
            self.full.grad, self.pending = self.pending, None

    @property
    def is_left(self) -> bool:
        """Whether a backward has left a gradient that is not taken yet."""
        return self.full is not None and self.full.grad is not None

    @property
    def is_waiting(self) -> bool:
        """Whether a gradient, or a partial sum, is taken and not reduced yet."""
        return self.pending is not None or self.partial is not None

    def hold_pending(self) -> None:
        """Leave a token behind that `zero_grad` removes."""
        if self.is_waiting:
            self.leave_token()

    def hold_partial(self, rows: torch.Tensor) -> None:
        """Keep `rows` until replicas are averaged, too, and leave a token behind."""
        self.partial = rows
        self.leave_token()

    def leave_token(self) -> None:
        """Make `zero_grad` reach what is not a gradient yet."""
        if self.sharded.grad is None:
            zero = torch.zeros((), dtype=self.local.dtype, device=self.local.device)
            self.sharded.grad = self._as_gradient(zero.expand(self.local.shape))
            self._is_token_ours = True
        self._token = (self.sharded.grad, _versions(self.sharded.grad))

    def drop_cleared(self) -> None:
        """Forget what is pending if its token was cleared meanwhile."""
        if self._is_cleared():
            self.drop_pending()

    def _is_cleared(self) -> bool:
        if self._token is None:
            return False
        token, versions = self._token
        return self.sharded.grad is not token or _versions(token) != versions

    def drop_pending(self) -> None:
        """Forget the local gradients and the token."""
        if self.full is not None:
            self.full.grad = None
        self.release_pending()

    def release_pending(self) -> torch.Tensor | None:
        """Let go of what is pending, and of the token; gives what waits for replicas."""
        partial, self.pending, self.partial = self.partial, None, None
        self.lift_token()
        return partial

    def lift_token(self) -> bool:
        """Take it away, if there is one; whether it was cleared since it was left."""
        is_cleared = self._is_cleared()
        if self._token is not None and self._is_token_ours and self.sharded.grad is self._token[0]:
            self.sharded.grad = None
        self._token, self._is_token_ours = None, False
        return is_cleared

    def complete_partial(self) -> None:
        """Let zeros be pending where nothing else is, so that what waits for replicas is sent."""
        if self.partial is not None and self.pending is None:
            self.pending = self.partial.new_zeros(self.shape)

    def add_gradient(self, rows: torch.Tensor) -> None:
        """Add this rank's `rows` of a mean gradient to the shard's; they are kept, not copied."""
        if self.sharded.grad is not None:
            self.sharded.grad._local_tensor.add_(rows)  # type: ignore[attr-defined]  # a DTensor
        else:
            self.sharded.grad = self._as_gradient(rows)
        hooks = self.sharded._post_accumulate_grad_hooks  # type: ignore[attr-defined]  # torch's
        for hook in list((hooks or {}).values()):
            hook(self.sharded)

    def _as_gradient(self, rows: torch.Tensor) -> DTensor:
        # What `from_local` comes to, without working out again what the parameter knows.
        spec = self.sharded._spec  # type: ignore[attr-defined]  # a DTensor
        return DTensor(rows, spec, requires_grad=False)


def _versions(gradient: torch.Tensor) -> tuple[int, int]:
    return gradient._version, gradient._local_tensor._version  # type: ignore[attr-defined]  # a DTensor
