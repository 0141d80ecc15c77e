"""The contract of replicas and of an optimizer whose state is divided over the ranks."""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer


def ddp(module: nn.Module, *, process_group: ProcessGroup | None = None) -> nn.Module:
    """Replicate `module` over the ranks of a group and average its gradients.

    Below, "finish" is a call of `finish_gradient_synchronization` after a backward. Sparse
    gradients are not judged.

    Args:
        module: the model of this rank. The gradients appear in its own Parameter objects.
        process_group: the ranks that take part; None means the default group.

    Returns:
        A wrapper, which is a module.

    Level `course`:
        called-alike: The wrapper takes the arguments of `module` and returns its values.
        first-weights: At construction every rank gets the first rank's parameters, frozen ones too.
        mean-gradient: After backward and finish, `.grad` is the mean of the ranks' local gradients.
        frozen-none: A frozen parameter keeps `grad is None`.

    Level `correct`:
        is-a-module: `parameters()` are those of `module`; `train()` and `eval()` reach it.
        runs-hooks: A forward calls `module` itself, so that its forward hooks run.
        first-buffers: At construction every rank gets the first rank's buffers.
        any-layout: Parameters and buffers of any dtype and memory layout are sent correctly.
        weights-stay: After construction the wrapper writes no weight.
        grad-dtype: `.grad` has the dtype of its parameter.
        since-zero-grad: A local gradient is everything that was accumulated since `zero_grad`.
        requires-grad: Every parameter keeps its `requires_grad`.
        unused-everywhere: A parameter that no rank uses keeps `grad is None`.
        unused-somewhere: A rank that does not use a parameter counts as zero in its mean.
        no-hang: Parameters that ranks leave unused never lead to a hang.
        any-order: Gradients may become ready in a different order on each rank.
        own-group: Collectives run over `process_group`, and gradients are divided by its size.
        equal-ranks: All ranks of the group get the same bits.
        equal-runs: Equal runs give equal bits.
        several-forwards: Several forwards may precede one backward.
        evaluation: A forward without gradients disturbs nothing.
        models-apart: Another wrapped model disturbs nothing.
        waits: Every collective that is launched is waited for.
        no-growth: Memory does not grow from step to step.
        after-exception: After an exception that the caller caught, the next step is right.

    Level `production`:
        buffers-follow: A training forward outside `no_sync` uses the first rank's buffers.
        one-copy: A step sends one copy of the gradients of trained parameters.
        same-order: All ranks send in the same order.
        overlaps: Reductions are launched during the backward, by hooks that do not block.
        early: Of 50 MiB of gradients the first reduction starts before the last one is ready.
        footprint: A step holds at most one further copy of the gradients.
        float16-sum: A sum in float16 does not overflow where the mean does not.
        original-alone: After a finished step, `module` called directly sends nothing.
        original-local: After a finished step, gradients of `module` called directly stay local.
        compile: `torch.compile` of `module` changes no value, before and after wrapping.
        compile-wrapper: `torch.compile` of the wrapper changes no value.
        larger-tensor: A parameter may be a part of a larger tensor, with gaps between its rows.
        dropped-models: Memory does not grow with models that are dropped.
        added-later: A trained parameter that is added or replaced later gets the mean gradient.

    May be refused:
        added-later: A trained parameter that comes later, by the next forward with gradients.
        unused-everywhere: A parameter that no rank uses, no later than in the next forward.
        unused-somewhere: A parameter that some ranks do not use.
        used-early: A parameter that is used only before the last micro-batch of a step.
        two-finishes: A second backward and finish without a `zero_grad` between.
        after-exception: The next step after an exception that the caller caught.
    """


def ddp_bucketed(
    module: nn.Module,
    *,
    bucket_size_mb: float,
    process_group: ProcessGroup | None = None,
) -> nn.Module:
    """As `ddp`, with the gradients packed into flat buckets.

    Args:
        module, process_group: as for `ddp`.
        bucket_size_mb: about the size of a bucket, in MiB.

    Level `production`:
        bucket-size: Gradients travel in buckets of about `bucket_size_mb` MiB.
    """


def finish_gradient_synchronization(wrapped: nn.Module) -> None:
    """Finish the reduction of gradients, after a backward outside `no_sync` and before an update.

    An implementation may leave it out: then nothing is left to do after a backward.

    Level `correct`:
        several-backwards: After several backwards, also of one forward, gradients are those of all.
        called-again: A second call changes nothing.

    May be refused:
        several-backwards: Several backwards before one call.
    """


def no_sync(wrapped: nn.Module) -> AbstractContextManager[Any]:
    """Return a context manager around forward *and* backward of a micro-batch.

    Around a forward alone, or a backward alone, its effect is unspecified.

    Level `correct`:
        local-sums: Inside, `.grad` holds this rank's plain sums.
        silent: Inside, nothing is sent.
        nests: Leaving an inner `no_sync` restores the state of the outer one.
        restores: The previous state is restored also when the body raises.

    Level `production`:
        whole-model: Of a model that `fsdp` returned no gradient is sent inside, and none is lost.

    May be refused:
        whole-model: A model that `fsdp` returned.
    """


def sharded_optimizer(
    params: Iterable[Any],
    optimizer_cls: type[Optimizer],
    *,
    process_group: ProcessGroup | None = None,
    **kwargs: Any,
) -> Optimizer:
    """Build an optimizer whose state is divided over the ranks of a group (ZeRO-1).

    Args:
        params: parameters or groups, as for `torch.optim`. Their gradients are averaged already.
        optimizer_cls: the optimizer of each rank's part.
        process_group: the ranks that take part; None means the default group.
        kwargs: options of `optimizer_cls`.

    Returns:
        A `torch.optim.Optimizer`. All ranks of the group call its `step` and `load_state_dict`.
        `add_param_group`, `state_dict` and `load_state_dict` may be absent; then they are not
        judged.

    Level `course`:
        same-values: After `step` all ranks hold the values that `optimizer_cls` alone would give.
        state-divided: `.state` holds only the state that this rank owns. Its keys are of any kind.
        added-groups: A group that `add_param_group` adds is treated like the others.

    Level `correct`:
        any-parameters: Sizes, memory layouts and the number of ranks do not matter.
        absent-gradients: A parameter without a gradient is treated as `optimizer_cls` alone does.
        frozen: A frozen parameter that still has a gradient is updated as by `optimizer_cls` alone.
        equal-ranks: After `step` all ranks of the group hold the same bits.
        closure: `step` evaluates a closure once, before updating, and returns its loss.
        closure-options: Options that the closure sets count in that step, and stay.
        divided-after-load: After a load, too, `.state` holds only the state that this rank owns.
        balanced: A rank's state is at most twice max(all state / ranks, any parameter's state).
        current-weights: A step begins with the current weights, also if other code wrote them.
        whole-groups: `param_groups` are the caller's, in order, with all parameters.
        rates: `param_groups` show the caller's rates, or the default of `optimizer_cls`.
        live-groups: A change of `param_groups` takes effect at the next step.
        zero-grad: `zero_grad` clears all gradients, to None.
        zero-grad-zeros: Where `zero_grad` takes `set_to_none`, False gives zeros.
        load: `load_state_dict` takes the unsharded optimizer's state dict, `step` in its own dtype.
        load-replaces: A load replaces all state that there was.
        state-dict: `state_dict` gives the unsharded optimizer's state dict.
        optimizers-apart: Optimizers of other parameters do not disturb it.
        waits: Every collective that is launched is waited for before `step` returns.

    Level `production`:
        unequal-ranks: Where ranks differ in parameters or options, all raise.
        one-copy: A step sends one copy of the trained parameters.
        same-order: All ranks send in the same order.
        few-messages: A step sends at most one message per parameter. It should be one per rank.
        one-owner: Each element is updated by one rank, from that rank's gradient alone.
        gradients-stay: A step does not change gradients.
        compile: `torch.compile(optimizer.step)` gives the same.
        larger-tensor: A parameter may be a part of a larger tensor, with gaps between its rows.
        sparse: A parameter with a sparse gradient is updated.

    May be refused:
        unequal-dtypes: Parameters of unequal dtypes.
        whole-tensors: An optimizer whose update of an element depends on other elements.
        counts-in-groups: An optimizer that keeps counts in its groups.
        step-keywords: An optimizer whose `step` takes further keywords.
        zero-grad-zeros: A call `zero_grad(set_to_none=False)`.
        state-dict: A call of `state_dict`.
        sparse: A parameter with a sparse gradient, with an error that says "sparse".
    """


def full_optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return, on every rank, the state dict that the unsharded optimizer would have.

    Level `correct`:
        unsharded: The state dict is the unsharded optimizer's, on every rank.
        inert: The call changes nothing.
    """
