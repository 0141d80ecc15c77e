"""The contract of what is divided: shards, their precision, and the clipping of gradients."""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh


def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: Any = None,
    ignored_params: set[nn.Parameter] | None = None,
) -> Any:
    """Shard the parameters of `module` in place, as one unit; inner units are sharded first.

    The caller seeds all ranks alike: sharding does not synchronise weights. "Full weights" are
    unsharded parameters. An "update" is `Optimizer.step`, a load function, or an in-place operation
    under `no_grad` on the Parameter or on its local tensor, between steps. All ranks make the same
    updates. `zero_grad` means `Optimizer.zero_grad`, unless a promise says "of the model". What
    `.grad` shows of gradients that are not reduced yet is not judged, nor are second derivatives.

    Args:
        module: a module; at level `production` also a list of modules, which become one unit.
        mesh: the ranks that take part; None means all. With two dims: (replicate, shard).
        reshard_after_forward: whether full weights are freed between forward and backward. An int
            is the number of ranks that then share the weights: all ranks mean True, 1 means False.
        mp_policy: made by `MixedPrecisionPolicy` of the same implementation.
        ignored_params: at level `production`, parameters that stay plain; see `ignored`.

    Returns:
        Anything. `module` gains `unshard`, `reshard`, and PyTorch's setters
        `set_reshard_after_{forward,backward}`, `set_modules_to_{forward,backward}_prefetch`,
        `set_requires_{gradient_sync,all_reduce}`, `set_is_last_backward`, `set_unshard_in_backward`
        and `set_gradient_divide_factor`. A method that is absent is not judged.

    Level `course`:
        plain-bits: A forward gives the bits of the plain model.
        mean-gradient: Gradients are the mean over the mesh of the local gradients.
        shards-only: Between steps a rank holds its shard of weights and optimizer state, no more.

    Level `correct`:
        dtensors: Parameters become DTensors sharded on dim 0.
        any-rows: A parameter may have any number of rows.
        by-hand: After `unshard` parameters are full, plain and current; after `reshard`, shards.
        unreduced: `set_requires_gradient_sync(False)` keeps gradients unreduced until it is True.
        resharding: `set_reshard_after_backward` decides whether a backward frees full weights.
        fresh-weights: After an update, the next forward uses the new weights.
        frozen-none: A frozen parameter keeps `grad is None`.
        freezing: A parameter may be frozen or thawed between steps.
        unused-none: A parameter that no rank uses in a step keeps `grad is None`.
        zero-grad: `zero_grad` also discards this rank's gradients that are not reduced yet.
        equal-runs: Equal runs give equal bits.
        freed: Full weights are freed after forward and backward, unless a setting keeps them.
        no-growth: Memory does not grow from step to step.
        dropped-models: Memory does not grow with models that are dropped.
        waits: Every collective that is launched is waited for.
        models-apart: Another model disturbs nothing.
        after-exception: After an exception that the caller caught, the next step is right.
        containers: Inputs and outputs may be in nested containers and named tuples.
        same-containers: Each container and named tuple keeps its type.
        dataclasses: Inputs and outputs may be in a dataclass.
        two-dims: A mesh of two dims replicates over the first and shards over the second.
        partial-reshard: An int as `reshard_after_forward` changes no value.
        hints: The prefetch setters may change when a unit is gathered. They change no value.
        integers: Frozen integers keep their values.
        jvp: `torch.func.jvp` of a forward gives what it gives of the plain model.
        state-dict: At any moment `state_dict` holds shards, and `load_state_dict` takes them.
        as-pytorch: Other options have the meaning and default of PyTorch's `fully_shard`.

    Level `production`:
        kept-part: An int as `reshard_after_forward` keeps that part of the weights after forward.
        ignored: Parameters in `ignored_params` stay plain, whole and local, and are not sent.
        lists: A list of modules is one unit.
        slices: A slice of a sharded container is an object of the container's own class.
        async-unshard: `unshard(async_op=True).wait()` unshards; an earlier `reshard` drops it.
        setters: A setter that is taken acts as that of PyTorch's `FSDPModule`.
        unequal-ranks: Where ranks differ in modules or policy, all ranks raise.
        unequal-replicas: Where ranks of a mesh of two dims differ, even in one row, all raise.
        earlier-hooks: Forward hooks and pre-hooks from before sharding see full weights.
        gathers-ahead: In backward the next gather is launched before the current unit has computed.
        flat-peak: Memory in addition to the shards does not grow with the number of units.
        one-collective: A unit is gathered and reduced by one collective per dtype, or one per rank.
        no-extra-bytes: A gather carries the unit's parameters, padded to equal shards, no more.
        trained-only: A reduction carries the gradients of trained parameters, padded likewise.
        unused-somewhere: In a unit that all backwards reach, a gradient that some ranks lack is 0.
        clears-between: `zero_grad` of the model clears gradients between forward and backward.
        clears-after-error: `zero_grad` of the model clears gradients after a caught exception.
        backward-after-clear: After `zero_grad` of the model a pending backward is right.
        own-containers: Dicts, lists and dataclasses of the user's own classes are taken.
        grad-dtype: With a `reduce_dtype` each gradient keeps the dtype of its parameter.
        gather-methods: `fsdp_pre_all_gather` and `fsdp_post_all_gather` of a parameter are called.
        one-gather-method: A parameter that has only one of these two methods is refused.
        recomputed-casts: A forward that activation checkpointing repeats is cast like the first.
        recomputed-unit: With activation checkpointing a unit is reduced and freed as without it.
        compile: `torch.compile` of a unit changes no value, before and after it is sharded.
        compile-model: `torch.compile` of the sharded model changes no value.
        added-later: A trained parameter that is added or replaced later gets the mean gradient.

    May be refused:
        added-later: A trained parameter that comes later, by the next forward with gradients.
        two-dims: A mesh of two dims.
        hints: A prefetch hint.
        mixed-dtypes: Parameters of unequal dtypes.
        tied: A parameter that has two names.
        unused-none: A parameter that no rank uses in a backward.
        partial-reshard: An int as `reshard_after_forward`.
        integers: A frozen parameter of integers.
        jvp: A forward under `torch.func.jvp`.
        after-exception: The next step after an exception that the caller caught.
        dataclasses: A dataclass among inputs or outputs, in the forward.
        gather-methods: A parameter with `fsdp_pre_all_gather` and `fsdp_post_all_gather`.
        unused-somewhere: A parameter that only some ranks use.
        backward-after-clear: A backward whose forward came before a `zero_grad` of the model.
        own-containers: A container of the user's own class among inputs or outputs.
        ignored: `ignored_params` of a module on the meta device.
        grad-dtype: A `reduce_dtype` for a unit of two dtypes, in the forward.
    """


def MixedPrecisionPolicy(
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
    cast_forward_inputs: bool = True,
) -> Any:
    """Return what `fully_shard` takes as `mp_policy`, with PyTorch's meaning and defaults.

    Args:
        param_dtype: full weights are gathered in this dtype, and forwards compute with them in it.
        reduce_dtype: gradients are reduced in it; None means `param_dtype`.
        output_dtype: floating-point outputs are cast to it.
        cast_forward_inputs: whether floating-point inputs are cast to `param_dtype`.

    Level `course`:
        computes: A forward computes with weights that were rounded to `param_dtype`.
        own-dtype: Shards keep their own dtype.

    Level `correct`:
        others-keep-dtype: The gradient of a shard has the dtype of the shard. Buffers keep theirs.
        reduces: Gradients are reduced in `reduce_dtype`, or else in `param_dtype`.
        accumulates: Between reductions gradients are accumulated in the reduction's dtype.
        casts: Floating-point inputs and outputs are cast as the arguments say.

    Level `production`:
        gathers: Weights are gathered in `param_dtype`.
    """


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method of a sharded module other than `forward` compute with full weights.

    Level `correct`:
        full-weights: The method computes with full weights, like `forward`.

    Level `production`:
        sharded-only: The call changes nothing on a module that is not sharded.
    """


def fsdp(module: nn.Module, *, compute_dtype: torch.dtype | None = None) -> nn.Module:
    """Wrap a whole model and shard its Linear and Embedding weights (the CS336 exercise).

    The bias of a Linear may be sharded or whole.

    The caller seeds all ranks alike. An optimizer is built over `parameters()` afterwards.
    `finish_gradient_synchronization` is called as for `ddp`. DTensors are not asked for.

    Args:
        module: the whole model.
        compute_dtype: sharded layers are gathered in it and compute in it; None means their own.
            The caller's model casts its inputs to it.

    Returns:
        A module that is called like `module`, with positional and keyword arguments.

    Level `course`:
        plain-bits: A forward gives the bits of the plain model.
        mean-gradient: An update uses the mean over ranks of the local gradients.
        shards-only: Between steps a rank holds its shard of Linear and Embedding weights.
        rest-whole: A parameter of no Linear or Embedding stays plain and whole on every rank.
        rest-mean: The gradient of a parameter of no Linear or Embedding is the mean over ranks.
        gathers: With `compute_dtype` the sharded layers are gathered in it.
        computes: With `compute_dtype` the sharded layers compute in it.
        optimizer-dtype: Parameters and gradients of an optimizer keep their dtype or are float32.

    Level `correct`:
        runs-hooks: A forward calls `module` itself, so that its forward hooks run.
        rest-names: A parameter of no Linear or Embedding keeps its name.
        freed: Full weights are freed after use, in forward and in backward.
        fresh-weights: A forward computes with current weights.
        equal-runs: Equal runs give equal bits.
        models-apart: Another model disturbs nothing.
        dropped-models: Memory does not grow with models that are dropped.
        adds-up: Gradients of several backwards add up.

    Level `production`:
        step-gathers: A step gathers a sharded weight at most twice, in `compute_dtype` or its own.
        step-reduces: A step reduces each gradient once, in `compute_dtype` or its own.
        tables: With `compute_dtype` an Embedding is gathered in it and its rows come in it.
        subclasses: Subclasses of Linear and Embedding are sharded.
        thawed-rest: A parameter of no Linear or Embedding may be thawed later.
        added-later: A trained parameter that is added or replaced later gets the mean gradient.

    May be refused:
        added-later: A trained parameter that comes later, by the next forward with gradients.
        any-rows: A weight whose number of rows is no multiple of the number of ranks.
        tied: A weight that layers share.
        reused: A layer that is called twice.
        frozen: A frozen weight.
        zeroed: A backward after `zero_grad(set_to_none=False)`.
        adds-up: A second backward without `zero_grad`.
        thawed-rest: A parameter of no Linear or Embedding that is thawed later.
        mixed-dtypes: Parameters of unequal dtypes.
        unused: A layer that is not used in a forward.
        root-layer: A Linear or Embedding as the whole model.
    """


def full_parameters(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Return `{name: full tensor}` on every rank.

    An implementation may leave it out: then `full_tensor()` is called where a parameter has it.

    Level `course`:
        whole: Every parameter is there, whole, on every rank.

    Level `correct`:
        plain-names: Names are the plain model's, after a `module.` if there is one.

    Level `production`:
        current: Values are the current ones, also of a unit that is unsharded by hand.
    """


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Clip gradients as `torch.nn.utils.clip_grad_norm_`, of replicated and sharded parameters.

    Args:
        parameters: a sharded gradient is a DTensor, and its `.placements` say how; a plain one is
            replicated, and equal on all ranks already.
        max_norm, norm_type, error_if_nonfinite: as for `torch.nn.utils.clip_grad_norm_`. A
            `norm_type` of zero is not judged: PyTorch counts tensors with it, and no elements.

    Returns:
        The global norm, a plain tensor. Where a power or a sum leaves the range of its dtype,
        infinity or zero is right as well. Without `error_if_nonfinite`, gradients are not judged
        where the norm is not finite.

    Level `correct`:
        as-pytorch: Everything else is as in `torch.nn.utils.clip_grad_norm_`.
        counts-once: Each element of the whole gradient counts once in the norm.
        equal-ranks: The norm is a plain tensor with the same bits on all ranks.
        nan: A NaN on any rank makes the norm NaN on all ranks.
        mixed: Plain gradients beside DTensors count once each.

    Level `production`:
        absent-somewhere: Where some ranks lack a gradient, the parts of the others count.
        unreduced: A gradient that is not reduced yet counts as its sum over the ranks.
        max-norm-zero: A `max_norm` of zero leaves zeros.
        listed-twice: A tensor that is listed twice is counted and scaled once.
        in-place: Gradients are scaled in place.
        one-collective: One collective of a few numbers is enough for one set of ranks.
        two-meshes: Gradients on meshes of different ranks count together.
        norm-dtype: The norm is rounded to float32, or to float64 where a gradient has it.

    May be refused:
        mixed: Plain gradients beside DTensors.
        two-meshes: Gradients on meshes of different ranks.
        absent-somewhere: A gradient that some ranks lack.
        unreduced: A gradient that is not reduced yet.
    """
