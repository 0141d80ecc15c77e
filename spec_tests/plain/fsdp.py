"""Fully sharded data parallelism: each rank keeps its rows of every parameter.

Problem: parameters, gradients and optimizer state of a model do not fit on each rank.

Idea: a *unit* is a module whose parameters are gathered together. Between uses each rank keeps its
rows (a DTensor, `Shard(0)`); full parameters exist while the unit computes, and no longer.

Steps
    1. Construction: keep the rows of this rank, as `torch.chunk` deals them out.
    2. Pre-forward: all-gather the unit's rows, register full parameters in their place.
    3. Post-forward: register the shards again and empty the storage of the full parameters. What
       autograd saved are views of that storage, so a second gather makes them valid again.
    4. Pre-backward, a hook on the outputs: gather again, and prefetch the unit before it in forward
       order, which comes next in backward.
    5. Post-backward, an autograd node on the inputs. It runs when their gradients are there, and so
       are those of the parameters, which come earlier: reduce-scatter the full ones, divide by
       the number of ranks, add to `.grad` of the shards, free. A callback at the end of backward
       does so for units whose inputs need no gradient.
    Without synchronisation, gradients wait unreduced beside a placeholder of zeros in `.grad`. A
    `zero_grad` of the optimizer replaces or writes the placeholder; then what waits is dropped.

Use: `fully_shard` makes a unit of each module that it is given; see the file of that name.

Cost: per step and parameter two all-gathers and one reduce-scatter, 1.5 times what DDP sends; in
memory a 1/ranks share of the model and two full units. Each reduction blocks until it is done.

Paper: Rajbhandari et al. 2020 (ZeRO-3); Zhao et al. 2023 (PyTorch FSDP).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_flatten, tree_unflatten


@dataclass
class Piece:
    """One parameter: where it is registered, its shard, and its full tensor while there is one."""

    places: list[tuple[nn.Module, str]]
    parameter: nn.Parameter
    full: Any = None
    pending: torch.Tensor | None = None
    token: tuple[Any, Any] = (None, None)  # the placeholder in `.grad`, and its version

    @property
    def local(self) -> torch.Tensor:
        return self.parameter._local_tensor  # type: ignore[attr-defined]  # it is a DTensor


@dataclass
class Pass:
    """What the units of one model share between forward and backward."""

    order: list[Unit] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)
    is_callback_queued: bool = False


class PostBackward(torch.autograd.Function):
    """The identity on a unit's inputs, whose backward runs once the unit's own is done."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, *tensors: torch.Tensor) -> Any:
        ctx.unit = unit
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.unit.post_backward()
        return (None, *gradients)


class Unit:
    """The parameters below one module that no unit further down has taken.

    Never used alone: `PlainFsdp` adds casts, loads and recovery, and marks modules as units.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        reshard_after_forward: Any,
        policy: Any,
        ignored: Any = (),
    ) -> None:
        self.module, self.mesh, self.policy = module, mesh, policy
        self.reshard_after_forward = reshard_after_forward
        self.ignored = {id(parameter) for parameter in ignored}
        self.flying: Any = None  # the version, and the messages of a gather that is under way
        self.is_unsharded = False
        self.gathered: Any = None  # the version of the shards that the full parameters are of
        self.group = mesh.get_group(mesh.ndim - 1)
        self.replicas = mesh.get_group(0) if mesh.ndim == 2 else None
        self.pieces = [self.shard(p, places) for p, places in self.managed().items()]
        self.reshard_after_backward = True
        self.is_synchronised = True
        self.is_last_backward = True
        self.factor: float | None = None
        self.in_backward = False
        self.is_root = False
        self.num_running = 0
        self.run: Any = None  # a Pass, once the root is known
        # A compiler must not trace what sends, frees and fills.
        before, after = map(torch.compiler.disable, (self.pre_forward, self.post_forward))
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        module.register_forward_hook(after, always_call=True)

    # ---------------------------------------------------------------------------- construction

    def managed(self) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
        found: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for owner in modules_without_units(self.module):
            for name, parameter in owner._parameters.items():
                if parameter is None or id(parameter) in self.ignored:
                    continue
                if hasattr(parameter, "_plain_fsdp_taken"):
                    raise ValueError(f"{name} is shared with a unit further down: tie within one")
                found.setdefault(parameter, []).append((owner, name))
        return found

    def size(self) -> int:
        return dist.get_world_size(self.group)

    def rank(self) -> int:
        return dist.get_rank(self.group)

    def rows(self, whole: torch.Tensor) -> int:
        return -(-whole.shape[0] // self.size())

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows, as `torch.chunk` deals them out."""
        rows = self.rows(whole)
        return whole[self.rank() * rows : (self.rank() + 1) * rows]

    def shard(self, parameter: nn.Parameter, places: list[tuple[nn.Module, str]]) -> Piece:
        parameter._plain_fsdp_taken = True  # type: ignore[attr-defined]  # a mark of ours
        local = self.cut(parameter.detach()).clone()
        sharded = nn.Parameter(
            self.as_dtensor(local, parameter), requires_grad=parameter.requires_grad
        )
        for owner, name in places:
            owner._parameters[name] = sharded
        return Piece(places, sharded)

    def as_dtensor(self, local: torch.Tensor, like: torch.Tensor) -> DTensor:
        placements = [Replicate()] * (self.mesh.ndim - 1) + [Shard(0)]
        return DTensor.from_local(
            local, self.mesh, placements, shape=like.shape, stride=like.stride(), run_check=False
        )

    # -------------------------------------------------------------------------- full parameters

    def unshard(self) -> None:
        if self.is_unsharded and self.is_fresh():
            return
        self.is_unsharded = False
        if self.flying is not None and self.flying[0] != self.version():
            self.discard_gather()
        if self.flying is None:
            self.launch_gather()
        # What is made during an evaluation serves the training after it.
        with torch.inference_mode(False), torch.no_grad():
            self.land_gather()
        self.is_unsharded = True

    def version(self) -> Any:
        return [(id(s), written(s), s.requires_grad) for s in (p.parameter for p in self.pieces)]

    def is_fresh(self) -> bool:
        return bool(self.gathered == self.version())

    def launch_gather(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            sent = [(pieces, *self.gather(pieces)) for pieces in self.by_dtype()]
        self.flying = (self.version(), sent)

    def discard_gather(self) -> None:
        for _, _, handle in self.flying[1] if self.flying is not None else ():
            handle.wait()
        self.flying = None

    def by_dtype(self) -> list[list[Piece]]:
        found: dict[torch.dtype, list[Piece]] = {}
        for piece in self.pieces:
            found.setdefault(self.compute_dtype(piece), []).append(piece)
        return list(found.values())

    def compute_dtype(self, piece: Piece) -> torch.dtype:
        return self.policy.param_dtype or piece.parameter.dtype

    def gather(self, pieces: list[Piece]) -> tuple[torch.Tensor, Any]:
        own = torch.cat([self.padded(p.local, p).reshape(-1) for p in pieces])
        own = own.to(self.compute_dtype(pieces[0]))
        if self.size() == 1:
            return own, Done()
        whole = own.new_empty(self.size() * own.numel())
        return whole, dist.all_gather_into_tensor(whole, own, group=self.group, async_op=True)

    def padded(self, local: torch.Tensor, piece: Piece) -> torch.Tensor:
        missing = self.rows(piece.parameter) - local.shape[0]
        return torch.cat([local, local.new_zeros(missing, *local.shape[1:])]) if missing else local

    def land_gather(self) -> None:
        version, sent = self.flying
        for pieces, whole, handle in sent:
            handle.wait()
            for piece, rows in zip(pieces, self.cut_gathered(pieces, whole), strict=True):
                values = rows.reshape(-1, *piece.parameter.shape[1:])[: piece.parameter.shape[0]]
                self.fill(piece, values.to(self.compute_dtype(piece)))
        self.flying, self.gathered = None, version

    def cut_gathered(self, pieces: list[Piece], whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Per parameter `[ranks, elements of a rank]`: the buffer holds a block per rank."""
        lengths = [self.rows(p.parameter) * p.parameter.shape[1:].numel() for p in pieces]
        return whole.view(self.size(), -1).split(lengths, dim=1)

    def fill(self, piece: Piece, values: torch.Tensor) -> None:
        if piece.full is None:
            piece.full = nn.Parameter(values.clone(), requires_grad=piece.parameter.requires_grad)
            return
        piece.full.untyped_storage().resize_(values.numel() * values.element_size())
        # Or autograd takes the second gather for a modification of what it saved.
        with torch.autograd._unsafe_preserve_version_counter(piece.full):
            piece.full.copy_(values)

    def reshard(self) -> None:
        self.register(sharded=True)
        if self.is_unsharded:
            self.is_unsharded = False
            self.free()

    def free(self) -> None:
        for piece in self.pieces:
            piece.full.untyped_storage().resize_(0)

    def register(self, *, sharded: bool) -> None:
        for piece in self.pieces:
            for owner, name in piece.places:
                owner._parameters[name] = piece.parameter if sharded else piece.full

    def prefetch(self) -> None:
        if not self.is_unsharded and self.flying is None:
            self.launch_gather()

    # --------------------------------------------------------------------------------- forward

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.find_root()
        self.unshard()
        self.register(sharded=False)
        self.num_running += 1
        if not torch.is_grad_enabled():
            return args, kwargs
        return self.watch_inputs(args, kwargs)

    def find_root(self) -> None:
        if self.run is not None:
            return
        run = Pass()
        for module in self.module.modules():
            unit = getattr(module, "_plain_fsdp", None)
            if unit is not None:
                unit.run = run
                unit.is_root = unit is self
                run.units.append(unit)

    def watch_inputs(self, args: Any, kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        where = [i for i, t in enumerate(leaves) if isinstance(t, torch.Tensor) and t.requires_grad]
        if where:
            passed = PostBackward.apply(self, *[leaves[i] for i in where])
            for index, tensor in zip(where, passed, strict=True):
                leaves[index] = tensor
        return tree_unflatten(leaves, spec)

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        self.num_running -= 1
        if self.num_running > 0:
            return output  # of a forward that a method of the same module has called
        self.num_running = 0
        if torch.is_grad_enabled() and not self.in_backward:
            self.run.order.append(self)
        self.register(sharded=True)
        if self.reshards_after_forward() and not self.in_backward:
            self.reshard()
        for tensor in tree_flatten(output)[0]:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(self.pre_backward)
        return output

    def reshards_after_forward(self) -> bool:
        wanted = self.reshard_after_forward
        return not self.is_root if wanted is None else wanted is True or wanted > 1

    # -------------------------------------------------------------------------------- backward

    def pre_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        if not self.run.is_callback_queued:
            self.run.is_callback_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end_of_backward)  # type: ignore[attr-defined]  # not in stubs
        if not self.in_backward:
            self.in_backward = True
            self.forget_what_was_cleared()
        self.unshard()
        for unit in self.next_in_backward():
            unit.prefetch()
        return gradient

    def next_in_backward(self) -> list[Unit]:
        order = self.run.order
        place = order.index(self) if self in order else 0
        return order[max(0, place - 1) : place]

    def post_backward(self) -> None:
        trainable = [p for p in self.pieces if p.parameter.requires_grad]
        arrived = [p for p in trainable if p.full is not None and p.full.grad is not None]
        if trainable and not arrived:
            return  # a later node of the same unit brings some, or the end of backward does
        self.take_gradients(arrived)
        if self.reshard_after_backward:
            self.reshard()

    def take_gradients(self, pieces: list[Piece]) -> None:
        with torch.no_grad():
            for piece in pieces:
                if piece.full is not None and piece.full.grad is not None:
                    self.add_pending(piece, piece.full.grad)
                    piece.full.grad = None
            if self.is_synchronised:
                self.reduce([p for p in pieces if p.pending is not None])
            else:
                self.hold(pieces)

    def add_pending(self, piece: Piece, gradient: torch.Tensor) -> None:
        gradient = gradient.to(self.policy.reduce_dtype or gradient.dtype)
        piece.pending = gradient if piece.pending is None else piece.pending + gradient

    def hold(self, pieces: list[Piece]) -> None:
        """Leave zeros in `.grad`: a zero_grad, which calls `requires_grad_`, clears what waits."""
        for piece in (p for p in pieces if p.pending is not None):
            if piece.parameter.grad is None:
                piece.parameter.grad = self.as_dtensor(piece.local.clone().zero_(), piece.parameter)
            token: Any = piece.parameter.grad  # what foreach writes to it is not counted
            token.requires_grad_ = token.__dict__.setdefault("calls", []).append
            piece.token = (token, written(token))

    def forget_what_was_cleared(self) -> None:
        for piece in self.pieces:
            token, version = piece.token
            if token is None:
                continue
            if piece.parameter.grad is not token or written(token) != version:
                piece.pending, piece.token = None, (None, None)

    def reduce(self, pieces: list[Piece]) -> None:
        for dtype in dict.fromkeys(p.pending.dtype for p in pieces if p.pending is not None):
            same = [p for p in pieces if p.pending is not None and p.pending.dtype == dtype]
            shards = self.cut_flat(same, self.mean(self.flatten(same)))
            for piece, shard in zip(same, shards, strict=True):
                self.assign(piece, shard.to(piece.parameter.dtype))
                piece.pending, piece.token = None, (None, None)

    def flatten(self, pieces: list[Piece]) -> torch.Tensor:
        blocks = []
        for piece in pieces:
            assert piece.pending is not None
            missing = self.size() * self.rows(piece.parameter) - piece.pending.shape[0]
            zeros = piece.pending.new_zeros(missing, *piece.pending.shape[1:])
            blocks.append(torch.cat([piece.pending, zeros]).view(self.size(), -1))
        return torch.cat(blocks, dim=1)

    def mean(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's segment of the mean."""
        own = flat.reshape(-1)
        if self.size() > 1:
            own = flat.new_empty(flat.numel() // self.size())
            dist.reduce_scatter_tensor(own, flat.reshape(-1), group=self.group)
        if self.replicas is not None:
            dist.all_reduce(own, group=self.replicas)
        return own / (self.factor or self.mesh.size())

    def cut_flat(self, pieces: list[Piece], own: torch.Tensor) -> list[torch.Tensor]:
        sizes = [self.rows(p.parameter) * p.parameter.shape[1:].numel() for p in pieces]
        return [
            part.view(-1, *p.parameter.shape[1:])[: p.local.shape[0]].clone()
            for part, p in zip(own.split(sizes), pieces, strict=True)
        ]

    def assign(self, piece: Piece, shard: torch.Tensor) -> None:
        if piece.parameter.grad is None:
            piece.parameter.grad = self.as_dtensor(shard, piece.parameter)
        else:
            gradient: Any = piece.parameter.grad
            gradient._local_tensor.add_(shard)
        self.tell(piece)

    def tell(self, piece: Piece) -> None:
        hooks = piece.parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]  # torch's
        for hook in list((hooks or {}).values()):
            hook(piece.parameter)

    def end_of_backward(self) -> None:
        for unit in self.run.units:
            if not unit.in_backward:
                unit.forget_what_was_cleared()
            unit.take_gradients([p for p in unit.pieces if p.parameter.requires_grad])
            if unit.in_backward and unit.reshard_after_backward:
                unit.reshard()
            unit.in_backward = False
            unit.discard_gather()  # one that was launched ahead and never used
        self.run.order.clear()
        self.run.is_callback_queued = False


def written(tensor: Any) -> tuple[int, int, int]:
    """Changes with every write: one through the DTensor is not counted by its local tensor."""
    return tensor._version, tensor._local_tensor._version, len(getattr(tensor, "calls", ()))


class Done:
    """The handle of a gather that had nothing to send."""

    def wait(self) -> None:
        pass


def modules_without_units(module: nn.Module) -> Iterator[nn.Module]:
    """`module` and what is in it, but for what is sharded already."""
    yield module
    for child in module.children():
        if not hasattr(child, "_plain_fsdp"):
            yield from modules_without_units(child)
