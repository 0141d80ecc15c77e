"""Fully sharded data parallelism: each rank keeps a part of every weight.

A layer's weights are gathered just before they are used and dropped again after; the gradients
are reduced and scattered, so that each rank gets the mean of its own part, which is all that
its optimizer sees. Memory falls with the number of ranks; what is computed stays the same.

Do one task after the other; the clauses of a task say when it is done. `fsdp` wraps a whole
model and is the exercise of CS336; `fully_shard` is PyTorch's function, called for each layer
from the inside out. Do one of them, or both; delete the other.

    1. Cut: each rank keeps its rows, and nothing is lost.
        python -m spec_tests --impl THIS_FILE --clause 'fsdp.init.[!cm]*'
    2. Gather before use: the forward computes what the plain model computes.
        python -m spec_tests --impl THIS_FILE --clause 'fsdp.init.[cm]*'
        python -m spec_tests --impl THIS_FILE --clause 'fsdp.forward.equals-*'
        python -m spec_tests --impl THIS_FILE --clause 'fsdp.forward.[tw]*'
        python -m spec_tests --impl THIS_FILE --clause 'fsdp.forward.runs-*'
    3. Reduce and scatter: the mean gradient of one's own rows; then train.
        python -m spec_tests --impl THIS_FILE --clause 'fsdp.forward.[chlnu]*'
        python -m spec_tests --impl THIS_FILE --clause 'fsdp.forward.evaluation-*'
        python -m spec_tests --impl THIS_FILE --clause 'fsdp.forward.resharding-*'
        python -m spec_tests --impl THIS_FILE --clause 'fsdp.training.*'
        python -m spec_tests --impl THIS_FILE --clause 'fsdp.backward.[!f]*'
        python -m spec_tests --impl THIS_FILE --clause 'fsdp.backward.finish-*'
        python -m spec_tests --impl THIS_FILE --clause 'fsdp.backward.forwards-*'
        python -m spec_tests --impl THIS_FILE --clause 'fsdp.backward.frozen-[!w]*'
    4. Drop what was gathered, and gather anew whatever was updated.
        python -m spec_tests --impl THIS_FILE --clause 'fsdp.backward.frozen-while-kept'
        python -m spec_tests --impl THIS_FILE --clause 'fsdp.refusals.*'
        python -m spec_tests --impl THIS_FILE --clause 'fsdp.footprint.*'
        python -m spec_tests --impl THIS_FILE --clause 'fsdp.lifecycle.*'
        python -m spec_tests --impl THIS_FILE --clause 'fsdp.state-dict.*'
    5. Accumulate over micro-batches; compute in a narrower dtype than you keep.
        python -m spec_tests --impl THIS_FILE --clause 'fsdp.accumulation.*'
        python -m spec_tests --impl THIS_FILE --clause 'fsdp.precision.*'
        python -m spec_tests --impl THIS_FILE --clause 'fsdp.programs.*'
    6. One message per layer, the next one on its way while this one computes.
        python -m spec_tests --impl THIS_FILE --level production --clause 'fsdp.traffic.*'
        python -m spec_tests --impl THIS_FILE --level production --clause 'fsdp.order.*'
        python -m spec_tests --impl THIS_FILE --clause 'fsdp.schedule.*'
        python -m spec_tests --impl THIS_FILE --level production --clause 'fsdp.compile.*'

All of it: `make check IMPL=THIS_FILE`; what a course asks: `ARGS="--level course"` besides.
Names and arguments are those of spec_tests/contract/sharding.py. Rajbhandari et al. 2020, "ZeRO",
section 5.3; Zhao et al. 2023, "PyTorch FSDP".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class ToDo(Exception):
    """This step is still to be done."""


def fsdp(module: nn.Module, *, compute_dtype: torch.dtype | None = None) -> nn.Module:
    """A module that is called like `module`, whose Linear and Embedding weights are sharded.

    Task 1:
      a. For each such weight: pad it to a multiple of the number of ranks, keep this rank's stretch
         as the new Parameter. A weight that two modules share is cut once and stays shared.
    Task 2:
      a. In a pre-forward hook all-gather the stretches, drop the padding, and let the layer see the
         full weight. Parameters that are not sharded are replicas, as in `ddp`.
    Task 3:
      a. In the backward, reduce-scatter the full weight's gradient and divide by the number of
         ranks; add it to the stretch's `.grad`. An autograd function whose forward gathers and
         whose backward reduces does both.
    Task 5: gather in `compute_dtype`; what the optimizer sees keeps its own.
    """
    raise ToDo("task 1: every rank keeps a stretch of each Linear and Embedding weight")


def finish_gradient_synchronization(wrapped: nn.Module) -> None:
    """Called after every backward, before the optimizer; delete it if nothing is left to do.

    Task 3:
      a. Wait for the reductions that the backward has launched.
      b. Average the gradients of what is not sharded.
    """
    raise ToDo("task 3: all reductions are finished, replicated parameters have the mean gradient")


def fully_shard(
    module: nn.Module,
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: Any = None,
) -> Any:
    """Shard `module` in place, without what an earlier call on a child has taken already.

    Task 1:
      a. Replace each parameter by a DTensor sharded on dim 0 (`DTensor.from_local`), tied ones by
         the same. No rank sends anything: the caller has seeded all alike.
      b. Give the module the methods of PyTorch's FSDPModule: unshard, reshard,
         set_requires_gradient_sync, set_reshard_after_backward,
         set_modules_to_forward_prefetch, set_modules_to_backward_prefetch.
    Task 2: a pre-forward hook gathers; a forward hook drops, unless it is the root or
      `reshard_after_forward` says otherwise.
    Task 3: gather again before the backward, reduce-scatter after it.
    Task 4: whatever changed the shards, the next forward must see it: gather anew, or know.
    """
    raise ToDo("task 1: every parameter becomes a DTensor sharded on dim 0")


def MixedPrecisionPolicy(
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
    cast_forward_inputs: bool = True,
) -> Any:
    """What `fully_shard` takes as `mp_policy`; a frozen dataclass with these fields will do.

    Task 5: gather and compute in `param_dtype`, reduce in `reduce_dtype` (else in `param_dtype`),
      cast floating-point inputs unless told not to, and outputs to `output_dtype`.
    """
    raise ToDo("task 5: a policy holds the dtypes to compute and to reduce in")


def full_parameters(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """`{name: full tensor}` on every rank; the clauses look at weights through it.

    Task 1: gather each sharded parameter, without padding; delete this function if your parameters
      are DTensors, whose `full_tensor()` is found without it.
    """
    raise ToDo("task 1: the whole weights by the plain model's names, on every rank")


# A toy of one Linear on two ranks, yours to change; or with `wrapped = fsdp(model)`:
#     torchrun --standalone --nproc-per-node=2 THIS_FILE
if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)  # equal weights on all ranks: nothing is sent when they are cut
    model: Any = nn.Linear(2, 2, bias=False)
    inputs = torch.tensor([[[1.0, 0.0]], [[3.0, 2.0]]])[rank]
    rows, output = model.weight.tolist(), model(inputs).tolist()
    wrapped = fully_shard(model)
    print(f"rank {rank}: rows {model.weight.to_local().tolist()}, expected {rows[rank : rank + 1]}")
    found = wrapped(inputs)
    print(f"rank {rank}: output {found.tolist()}, expected {output}")
    found.sum().backward()
    print(f"rank {rank}: gradient {model.weight.grad.to_local().tolist()}, expected [[2.0, 1.0]]")
    dist.destroy_process_group()
