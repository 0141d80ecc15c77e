"""The contract of what many ranks do together: replicas, a divided optimizer, shards, norms."""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer


def ddp(module: nn.Module, *, process_group: ProcessGroup | None = None) -> nn.Module:
    """Replicate `module` over the group: each gradient becomes its own mean.

    Returns a module that is called like the original, whose `parameters()` are the original's, and
    whose `train()` and `eval()` reach it. A forward calls the original, hooks included. At
    construction every rank takes the parameters (frozen ones too) and buffers of the group's first
    rank, of any dtype and memory layout; later no weight is written. After a backward pass and
    `finish_gradient_synchronization`, `.grad` of the *original* Parameter objects is the mean over
    the group of the local gradients, in the parameter's dtype; a local gradient is everything
    accumulated since `zero_grad`. Frozen parameters keep `grad is None`, all keep `requires_grad`.
    A parameter unused on all ranks keeps None, or is an error no later than the next forward;
    unused on some ranks only, it holds the mean with zero for the absent, or is an error. Never a
    hang. Gradients may become ready in another order on each rank. The group decides who talks and
    by how many one divides. All ranks get the same bits, and equal runs give equal bits. Several
    forwards may feed one backward; a forward without gradients disturbs nothing, nor does another
    wrapped model. What is launched is waited for, and memory does not grow from step to step. After
    a caught exception the next step is right, or an error.

    Level `production`:
    - A training forward sees the first rank's buffers.
    - A step sends one copy of the trained gradients, in one order on all ranks, in buckets of the
      size that was asked for, launched during the backward by hooks that do not block. It holds no
      more than one other copy of them.
    - A sum in float16 does not overflow where the mean does not.
    - Forward and backward of the original alone, after a finished step, send nothing, and their
      gradients stay local.
    - `torch.compile` of the module, before or after wrapping, or of the wrapper changes no value.
    - A parameter may be a part of a larger tensor, with gaps between its rows.
    """


def ddp_bucketed(
    module: nn.Module,
    *,
    bucket_size_mb: float,
    process_group: ProcessGroup | None = None,
) -> nn.Module:
    """As `ddp`, with the gradients packed into flat buckets of about `bucket_size_mb` MiB."""


def finish_gradient_synchronization(wrapped: nn.Module) -> None:
    """Called after a backward that is outside `no_sync`, before the optimizer.

    Several backwards, also of one forward, may come before one call: then gradients are those of
    all of them, or there is an error. Never called inside `no_sync`. Absent means that nothing is
    left to do after backward. A second call changes nothing.
    """


def no_sync(wrapped: nn.Module) -> AbstractContextManager[Any]:
    """A context manager around forward *and* backward of a micro-batch.

    Inside, `.grad` holds plain local sums and nothing is sent. Other placements (only the forward,
    only the backward) are unspecified. It nests, and it restores the previous state also when the
    body raises. Level `production`: around a model that `fsdp` made as well, or it is refused.
    """


def sharded_optimizer(
    params: Iterable[Any],
    optimizer_cls: type[Optimizer],
    *,
    process_group: ProcessGroup | None = None,
    **kwargs: Any,
) -> Optimizer:
    """ZeRO-1: a `torch.optim.Optimizer` whose state is divided over the group.

    Gradients arrive already averaged. `step` evaluates a closure that it is given once, first, and
    returns its loss; it updates what this rank owns and leaves all ranks of the group with equal
    bits, the values that `optimizer_cls` alone would give, whatever the sizes, the memory layout,
    the number of ranks, and which parameters have no gradient. Right or refused, never wrong in
    silence: parameters of unequal dtypes, and optimizers that look at whole tensors, keep counts in
    their groups, or whose `step` takes further keywords. `.state` holds only owned state, also
    after a load. No rank's state exceeds twice the larger of its share and the largest parameter's
    state; it should exceed its share by no more than the largest parameter's. Weights that others
    change are taken as they are. `param_groups` are the caller's, in order and whole, with their
    rates or the default of `optimizer_cls`, also those that `add_param_group` adds, and live, so a
    scheduler's change takes effect at the next step; `zero_grad` clears all gradients, to None, or
    to zero as torch.optim's does, if it takes `set_to_none`. `load_state_dict`, which all ranks
    call, takes the unsharded optimizer's state dict in place of all that there was; `state_dict`
    gives that, or raises. `add_param_group`, `state_dict` and `load_state_dict` may be absent: then
    they are not judged. Optimizers of other parameters do not disturb it. What is launched is
    waited for before `step` returns.

    Level `production`:
    - Sparse parameters are right, or refused as such; ranks that differ in parameters or options
      all raise.
    - A step sends one copy of the trained parameters, in one order on all ranks, and a message for
      each at most. Each element is updated by one rank, from that rank's gradient alone, and
      gradients are left as they are.
    - `torch.compile(optimizer.step)` is the same.
    - A parameter may be a part of a larger tensor, with gaps between its rows.
    """


def full_optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """On every rank, the state dict that the unsharded optimizer would have; changes nothing."""


def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: Any = None,
) -> Any:
    """FSDP in place, called bottom-up, with meaning and defaults of PyTorch's `fully_shard`.

    Forwards have the plain model's bits, gradients are the mean over the mesh, and equal runs give
    equal bits. A mesh of two dimensions replicates over the first and shards over the second, or it
    is refused; so may hints to prefetch be. Any number of rows is sharded; mixed dtypes, tied and
    unused parameters, too, or they are refused. Right or refused as well: an int as
    `reshard_after_forward`, the number of ranks that then share the weights, of which all means
    True and 1 False; frozen integers, which keep their values; methods `fsdp_pre_all_gather` and
    `fsdp_post_all_gather` of a parameter, which are called; and `torch.func.jvp` of a forward,
    which gives what it gives of the plain model. A parameter unused on all ranks keeps None, as a
    frozen one does, and may be frozen or thawed between steps.
    `mp_policy` is built from the implementation's own `MixedPrecisionPolicy(param_dtype=,
    reduce_dtype=, output_dtype=, cast_forward_inputs=)`. Parameters become DTensors sharded on dim
    0. The module then has `unshard`, `reshard`, `set_requires_gradient_sync`,
    `set_reshard_after_backward`, `set_modules_to_forward_prefetch` and
    `set_modules_to_backward_prefetch`. A method that is absent is not judged. Weights are not
    synchronised: the caller seeds all ranks alike. After an update the next forward uses current
    weights; an update is `Optimizer.step`, a load function, or an in-place operation under
    `no_grad` on the Parameter or its local tensor, between steps. `zero_grad` clears what waits on
    this rank for its reduction, too. Memory does not grow from step to step or with models that are
    dropped, what is launched is waited for, and another model disturbs nothing. After a caught
    exception the next step is right, or an error.
    Inputs and outputs may sit in nested containers and named tuples, which stay what they are. They
    may sit in a dataclass, or the forward refuses a dataclass.
    Level `production` asks for more of PyTorch's: `ignored_params`, a list of modules as one unit,
    `unshard(async_op=True)`, whose gather `reshard` discards, and the setters that
    `spec_tests/fsdp/test_settings.py` names. Ranks that differ in modules or policy all raise, on a
    2-D mesh too. Forward hooks and pre-hooks that a module had before it was sharded see its full
    weights. In backward the next unit is gathered before the current one has computed, and what is
    alive above the shards does not grow with the number of units. A unit is gathered and reduced by
    one collective each (or by one for each rank), which carries its parameters, or the gradients of
    its trained ones, padded to equal shards and no more. A parameter that some ranks alone use, of
    a unit that the backwards of all reach, holds the mean with zero for the absent, or is an error.
    The model's `zero_grad` clears gradients between forward and backward, and after a caught
    exception, too; then the backward of a forward that had come before is right, or an error.
    Dicts, lists and dataclasses of classes of one's own are taken, or are an error. With a
    reduce_dtype each gradient keeps its parameter's dtype, or the forward refuses a unit of two. Of
    the two methods of the all-gather one alone is refused. A forward that activation checkpointing
    repeats is cast as the first, and its unit is reduced and freed as ever. `torch.compile` of
    units, before or after they are sharded, or of the sharded model changes no value.
    """


def MixedPrecisionPolicy(
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
    cast_forward_inputs: bool = True,
) -> Any:
    """What `fully_shard` takes as `mp_policy`, with the meaning and defaults of PyTorch's.

    Weights are gathered and computed with in `param_dtype`, gradients reduced in `reduce_dtype`
    (else in `param_dtype`) and accumulated in it between reductions; floating-point inputs are cast
    to `param_dtype` unless `cast_forward_inputs` is false, outputs to `output_dtype`. Shards,
    gradients of shards and buffers keep their own dtype.
    """


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Lets a method of a sharded module beside `forward` compute with full weights, too."""


def fsdp(module: nn.Module, *, compute_dtype: torch.dtype | None = None) -> nn.Module:
    """The whole-model wrapper of the CS336 exercise: shards Linear and Embedding weights.

    Returns a module that is called like the original, with positional and keyword arguments, and
    calls it, hooks included. DTensors are not asked for. The caller seeds all ranks alike. A
    parameter that belongs to no Linear or Embedding keeps its name, stays plain and whole on every
    rank, and its gradient is the mean over ranks. An optimizer is built over `parameters()`
    afterwards. `finish_gradient_synchronization` is called as for `ddp`; an update then uses the
    mean gradient. Full weights are freed after use, in forward and in backward, and a forward
    computes with current weights. With `compute_dtype` the sharded layers are gathered in it and
    compute in it, and the model casts its inputs; what an optimizer sees keeps its dtype or is
    float32. Bits, models and runs are as with `fully_shard`. Right or refused, never wrong in
    silence: rows that the ranks do not divide, weights that layers share, layers that are called
    twice, frozen weights, a backward after `zero_grad(set_to_none=False)`, and a second backward
    without `zero_grad`, whose gradients add up.
    Level `production`: a step gathers a sharded weight twice at most and reduces each gradient
    once, in their own dtypes; with `compute_dtype` tables as well; subclasses of Linear and
    Embedding are sharded, too; what belongs to none may be thawed later, or that is refused.
    """


def full_parameters(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """`{name: full tensor}` on every rank, by the plain model's names (after a `module.`, if any).

    Absent: `full_tensor()` where a parameter has it. Level `production`: the current values,
    also of what is unsharded by hand.
    """


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_` for replicated, sharded and mixed parameters.

    Sharded gradients are DTensors (`.placements` says how); plain ones are replicas.

    Returns the global norm as a plain tensor with the same bits on all ranks, each element counted
    once; what is replicated is equal on all ranks already. A NaN anywhere makes it NaN. Plain
    gradients beside DTensors may be refused with an error. Level `production`: so may be gradients
    that are absent on some ranks, where what is there counts, and those that are not reduced yet,
    where their sum does. A `max_norm` of zero leaves zeros. A tensor that is listed twice is
    counted and scaled once, gradients are scaled in place, one collective of a few numbers is
    enough for what is sharded over the same ranks, and the norm has the range and rounding of
    float32, or of float64 where a gradient has it.
    """
