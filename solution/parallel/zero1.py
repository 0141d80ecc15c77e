"""ZeRO-1: the state of the optimizer is divided over the ranks, each parameter to one owner.

Problem. Replicas with equal gradients all compute the same update, and all keep the same moments:
with AdamW twice the size of the model, on every rank. But an update is needed once. So each
parameter gets one *owner*, who keeps its state and updates it; the others receive the new value.

1. Construction deals parameters to owners: the largest first, each to the rank that has the fewest
   bytes so far; those that train before frozen ones, which have no state. The largest share then
   exceeds the mean share by less than the largest parameter (Graham 1969, "Bounds on
   Multiprocessing Timing Anomalies"). Sizes and order alone decide, so nothing is sent. All ranks
   check that they hold the same parameters (`agreement.py`), and each builds an optimizer of the
   given class over what it owns, maybe nothing.
2. Before the first exchange the parameters of each owner move into a *slab*: a flat buffer, whose
   pieces become the `.data` of the very Parameter objects. Modules and hooks notice nothing.
3. `step`: options of `param_groups` go to the local optimizer; it steps; owners broadcast their
   slabs, all in flight at once: on gloo several times as fast as an all-gather.

       rank 0   step embedding, norm    |-- broadcast --|
       rank 1   step up, down, bias     |-- broadcast --|   <- `step` returns here

4. `full_optimizer_state` collects the parts as the state dict of the unsharded optimizer: every
   rank describes its tensors, then broadcasts them in a few large messages. Pickling them would
   hold the state three times. `load_state_dict` takes such a state dict and keeps this rank's part.
   So what was saved at one world size, or without sharding, can be loaded at any other.

Invariants.
- `.state` holds what this rank owns; `param_groups` hold all parameters, in the caller's order.
- After `step` all ranks hold the owners' bits, whatever their own gradients were.
- Parameters are unsharded, so each update is the unsharded optimizer's, bit for bit, also where it
  depends on a whole tensor (Muon, Adafactor). One that depends on several (LBFGS) is refused.
- Pieces begin where allocations of their own could (64 bytes), so kernels compute the same bits. A
  parameter that has got other memory since (`model.to`), or that begins to train, is found by its
  address, and slabs are laid out anew with the values found.

Cost. Per step and rank one copy of the parameters that train, in W messages for each dtype. State
is 1/W of the unsharded one's, within one parameter; beside it one slab, while it is laid out.

Paper: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", section 5.1 (P_os). PyTorch counterpart: `ZeroRedundancyOptimizer`, with the same greedy
partition and `parameters_as_bucket_view=True`. It wants one dtype, compares nothing between ranks,
sends frozen parameters too, and pickles state to one rank at a time. Left out: shards that cut
through parameters (exactly 1/W, but for elementwise optimizers only); a step that overlaps with the
backward; and help for the others when `step` raises on one rank alone: they wait for it.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from solution import comm, flat
from solution.parallel.agreement import on_all_ranks, send_values

_EXPECTED = "the same model and the same parameter groups on all ranks"
OptimizerGroup = dict[str, Any]  # a parameter group of an optimizer
Parameters = Iterable[torch.Tensor] | Iterable[OptimizerGroup] | Iterable[tuple[str, torch.Tensor]]


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer whose state is divided over the ranks of a process group.

    All ranks construct it and call `step`, `add_param_group`, `load_state_dict` and
    `full_optimizer_state`, in the same order. Gradients arrive already averaged. A change of an
    option in `param_groups` acts at the next step.
    """

    _local: torch.optim.Optimizer  # over what this rank owns; absent in the base constructor

    def __init__(
        self,
        params: Parameters,
        optimizer_cls: type[torch.optim.Optimizer],
        *,
        process_group: comm.Group = None,
        **kwargs: Any,
    ) -> None:
        """As `optimizer_cls(params, **kwargs)`, divided over `process_group`.

        Raises:
            TypeError: `optimizer_cls` is no class of optimizers.
            ValueError: no parameters, some that cannot be divided, or other ones than on another
                rank. Raised on every rank, also if only one of them is wrong.
        """
        comm.require_group(process_group, caller="ShardedOptimizer")
        self.process_group = process_group
        self._ownership = _Ownership(process_group)

        def build() -> Iterator[str]:
            _require_divisible(optimizer_cls)
            torch.optim.Optimizer.__init__(self, params, {})
            self._ownership.deal(self.param_groups)
            own = [self._ownership.own_part(group) for group in self.param_groups]
            self._local = optimizer_cls(own, **kwargs)
            self.defaults, self.state = self._local.defaults, self._local.state
            self._take_options()
            return _described(self.param_groups)

        on_all_ranks(build, [process_group], expected=_EXPECTED)

    def add_param_group(self, param_group: OptimizerGroup) -> None:
        """As the unsharded optimizer's; all ranks call it.

        Raises:
            TypeError, ValueError: on every rank, as in the constructor; nothing was added.
        """
        if not hasattr(self, "_local"):  # called by the constructor of the base
            super().add_param_group(param_group)
            return
        first = len(self.param_groups)

        def add() -> Iterator[str]:
            self._hand_in_options()  # a rate that was changed since the last step
            torch.optim.Optimizer.add_param_group(self, param_group)
            self._ownership.deal(self.param_groups[first:])
            self._local.add_param_group(self._ownership.own_part(self.param_groups[first]))
            self._take_options()
            return _described(self.param_groups[first:])

        try:
            on_all_ranks(add, [self.process_group], expected=_EXPECTED)
        except Exception:
            for group in self.param_groups[first:]:
                self._ownership.take_back(group["params"])
            del self.param_groups[first:], self._local.param_groups[first:]
            raise

    # ---------------------------------------------------------------------------------- a step

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:  # type: ignore[override]  # one signature for both overloads
        """Update what this rank owns; return when every rank has all new values.

        The closure is evaluated on every rank, by the local optimizer, which gets `kwargs` as well.
        Options that it changes act in this step.
        """
        self._hand_in_options()
        arguments = () if closure is None else (partial(self._evaluated, closure),)
        loss = _step_inside(type(self).step, self._local)(*arguments, **kwargs)
        self._take_options()
        self._ownership.exchange()
        return loss

    def _evaluated(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self._hand_in_options()
        return loss

    def _hand_in_options(self) -> None:
        for mine, group in zip(self._local.param_groups, self.param_groups, strict=True):
            mine.update(_options(group))

    def _take_options(self) -> None:
        """Copy to `param_groups` the defaults of the class, and what its steps write to groups."""
        for mine, group in zip(self._local.param_groups, self.param_groups, strict=True):
            group.update(_options(mine))

    # ----------------------------------------------------------------------------------- state

    def owns(self, parameter: torch.Tensor) -> bool:
        """Whether this rank keeps the state of `parameter`; loading reads that of no other."""
        return self._ownership.is_mine(parameter)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict, for a group of one rank.

        Raises:
            RuntimeError: the state is divided; use `full_optimizer_state`, on all ranks.
        """
        num_ranks = comm.size(self.process_group)
        if num_ranks > 1:
            raise RuntimeError(
                f"rank {comm.rank(self.process_group)}: expected the state of all parameters, but "
                f"it is divided over {num_ranks} ranks; call full_optimizer_state(optimizer) on "
                "all of them"
            )
        return super().state_dict()

    def full_state_dict(self) -> dict[str, Any]:
        """See `full_optimizer_state`."""
        packed, group = torch.optim.Optimizer.state_dict(self), self.process_group
        device = next(iter(self._ownership.owners)).device  # where the backend can send from
        own = tree_map(_copied, packed["state"])
        without_values = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), own)
        empty = partial(torch.empty_like, device="cpu")
        whole: dict[int, dict[str, Any]] = {}  # by the number of the parameter in a state dict
        for source, entries in enumerate(comm.gather_objects(without_values, group)):
            is_own = source == comm.rank(group)
            state = own if is_own else tree_map_only(torch.Tensor, empty, entries)
            tensors = [value for value in tree_leaves(state) if isinstance(value, torch.Tensor)]
            send_values(tensors, source, group, device=device)
            whole |= state
        groups = copy.deepcopy(packed["param_groups"])
        return {"state": dict(sorted(whole.items())), "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's part of the unsharded optimizer's state; all ranks call it.

        It comes from `full_optimizer_state` at any world size, or from a plain optimizer.

        Raises:
            ValueError: its groups differ from this optimizer's.
        """
        saved = itertools.chain.from_iterable(g["params"] for g in state_dict["param_groups"])
        live = itertools.chain.from_iterable(g["params"] for g in self.param_groups)
        # Of unequal length where the groups do not fit: the base says so, below.
        mine = {index for index, p in zip(saved, live, strict=False) if self.owns(p)}
        kept = {index: entries for index, entries in state_dict["state"].items() if index in mine}
        super().load_state_dict({**state_dict, "state": kept})
        # Through the class's own method, which may bring an older state up to date.
        groups = [self._ownership.own_part(group) for group in self.param_groups]
        self._local.__setstate__({"state": self.state, "param_groups": groups})
        self.state = self._local.state
        self._take_options()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a ShardedOptimizer belongs to its process group and cannot be copied or pickled; save "
            "full_optimizer_state(optimizer) and load it into a new one"
        )


sharded_optimizer = ShardedOptimizer  # the contract's name


def full_optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state dict of the unsharded optimizer, on every rank; all ranks call it.

    Tensors are copies on the CPU. For a plain optimizer it is the own `state_dict()`.
    """
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.full_state_dict()
    return optimizer.state_dict()


def _require_divisible(optimizer_cls: type[torch.optim.Optimizer]) -> None:
    kind = torch.optim.Optimizer
    is_kind = isinstance(optimizer_cls, type) and issubclass(optimizer_cls, kind)
    if not is_kind or issubclass(optimizer_cls, ShardedOptimizer):
        raise TypeError(
            f"expected a class of torch.optim optimizers, such as torch.optim.AdamW, got "
            f"{optimizer_cls!r}; its arguments follow as keywords"
        )
    if issubclass(optimizer_cls, torch.optim.LBFGS):
        raise ValueError(
            "expected an optimizer that updates each parameter by itself, got LBFGS, whose steps "
            "depend on all gradients at once; use it unsharded"
        )


def _step_inside(outer: Any, optimizer: Any) -> Callable[..., Any]:
    """Return `optimizer.step` without the annotation and the global hooks that `outer` has too."""
    step = optimizer.step
    has_hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    is_alike = getattr(step, "__code__", None) is outer.__code__  # of PyTorch's wrapper
    return partial(step.__wrapped__, optimizer) if is_alike and not has_hooks else step


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return copy.deepcopy(value)


# -------------------------------------------------------------------------------------- owners


class _Ownership:
    """Which rank of `group` owns which parameter."""

    def __init__(self, group: comm.Group) -> None:
        self.owners: dict[torch.Tensor, int] = {}  # in the order in which they were dealt
        self._group = group
        # Owner, 1-D memory and parameters, for each owner, dtype and device.
        self._slabs: list[tuple[int, torch.Tensor, list[torch.Tensor]]] = []
        self._addresses: dict[torch.Tensor, int] = {}  # of the parameters in slabs
        self._frozen: list[torch.Tensor] = []  # not in slabs

    def deal(self, groups: Sequence[OptimizerGroup]) -> None:
        """Give every parameter of `groups` an owner."""
        named = {p: name for group in groups for p, name in _named(group)}
        _require_plain(named, self.owners)
        load_bytes = [0] * comm.size(self._group)
        for parameter, owner in self.owners.items():
            load_bytes[owner] += parameter.nbytes
        for parameter in sorted(named, key=lambda p: (not p.requires_grad, -p.nbytes)):
            self.owners[parameter] = owner = load_bytes.index(min(load_bytes))
            load_bytes[owner] += parameter.nbytes

    def take_back(self, parameters: Iterable[torch.Tensor]) -> None:
        """Undo `deal` for these parameters."""
        for parameter in parameters:
            self.owners.pop(parameter, None)

    def is_mine(self, parameter: torch.Tensor) -> bool:
        """Whether this rank owns `parameter`."""
        return self.owners.get(parameter) == comm.rank(self._group)

    def own_part(self, group: OptimizerGroup) -> OptimizerGroup:
        """Return the group with this rank's parameters only."""
        return {**_options(group), "params": [p for p in group["params"] if self.is_mine(p)]}

    @torch._disable_dynamo  # a compiled step is the local optimizer's
    @torch.no_grad()
    def exchange(self) -> None:
        """Return when every parameter that trains has its owner's value, on every rank."""
        if comm.size(self._group) == 1:
            return
        if not self._is_laid_out():
            self._lay_out()
        handles = [comm.broadcast(slab, owner, self._group) for owner, slab, _ in self._slabs]
        for handle in handles:
            handle.wait()
        # A graph from before the exchange is refused on every rank, not on the owner's alone.
        for owner, _, parameters in self._slabs:
            if owner != comm.rank(self._group):
                torch.autograd.graph.increment_version(parameters)

    def _is_laid_out(self) -> bool:
        return (
            len(self._addresses) + len(self._frozen) == len(self.owners)
            and all(p.data_ptr() == address for p, address in self._addresses.items())
            and not any(map(_can_change, self._frozen))
        )

    def _lay_out(self) -> None:
        shares: dict[tuple[int, torch.dtype, torch.device], list[torch.Tensor]] = {}
        self._frozen = []
        for parameter, owner in self.owners.items():
            # A parameter that was in a slab stays in one: its memory is a part of it.
            if _can_change(parameter) or parameter in self._addresses:
                kind = (owner, parameter.dtype, parameter.device)
                shares.setdefault(kind, []).append(parameter)
            else:
                self._frozen.append(parameter)
        self._slabs, self._addresses = [], {}
        for (owner, dtype, device), parameters in shares.items():
            offsets, end = flat.aligned_offsets(parameters)
            memory = torch.zeros(end, dtype=dtype, device=device)
            self._slabs.append((owner, memory, parameters))
            for parameter, offset in zip(parameters, offsets, strict=True):
                place = memory.as_strided(parameter.shape, flat.strides_for(parameter), offset)
                parameter.data = place.copy_(parameter)
                self._addresses[parameter] = place.data_ptr()


def _options(group: OptimizerGroup) -> OptimizerGroup:
    """Return a parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _described(groups: Sequence[OptimizerGroup]) -> Iterator[str]:
    """Yield a line for each group and parameter, equal on ranks that fit together."""
    for number, group in enumerate(groups):
        plain = {
            key: value
            for key, value in sorted(_options(group).items())
            if isinstance(value, bool | int | float | str | tuple)
        }
        yield f"group {number} with {plain}"
        for parameter, name in _named(group):
            yield (
                f"{name} of group {number}: {parameter.dtype} {tuple(parameter.shape)}, "
                f"requires_grad={parameter.requires_grad}"
            )


def _named(group: OptimizerGroup) -> list[tuple[torch.Tensor, str]]:
    """Return each parameter with its name, or its number in the group if it has none."""
    names = group.get("param_names") or range(len(group["params"]))
    return [(p, f"parameter {name!r}") for name, p in zip(names, group["params"], strict=True)]


def _can_change(parameter: torch.Tensor) -> bool:
    # Optimizers update whatever has a gradient, and a frozen parameter may be given one by hand.
    return parameter.requires_grad or parameter.grad is not None


def _require_plain(named: Mapping[torch.Tensor, str], others: Iterable[torch.Tensor]) -> None:
    addresses = {p.data_ptr() for p in others if p.numel()}
    for parameter, where in named.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter) or parameter.is_meta:
            raise ValueError(f"expected {where} to have values, got none; materialise it first")
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"expected {where} to be a plain tensor, got a DTensor; what is sharded already "
                "has sharded state with the plain optimizer"
            )
        if parameter.layout != torch.strided:
            raise ValueError(f"expected {where} to be dense, got {parameter.layout}")
        if parameter.numel() and parameter.data_ptr() in addresses:
            raise ValueError(
                f"expected {where} to have memory of its own, got that of another parameter; to "
                "tie them use one Parameter in both places"
            )
        addresses.add(parameter.data_ptr())
