"""Data parallelism: replicas that stay equal because they average their gradients.

Every rank has the whole model and a part of the batch. Three things make N replicas one model:
they start equal, they update with the same gradient (the mean over ranks of their own), and
nobody waits for a message that another rank does not send.

Do one task after the other; the clauses of a task say when it is done:

    1. Start equal.
        python -m spec_tests --impl THIS_FILE --clause 'ddp.construction.*'
    2. Average after the backward: whoever contributes, whatever is frozen, tied or unused.
        python -m spec_tests --impl THIS_FILE --clause 'ddp.gradients.*' --clause 'ddp.training.*'
    3. Accumulate: no_sync sends nothing, and the window's sum is averaged once.
        python -m spec_tests --impl THIS_FILE --clause 'ddp.no-sync.*' --clause 'ddp.accumulation.*'
    4. Talk to your own group only, survive an exception, whatever the order of events.
        python -m spec_tests --impl THIS_FILE --clause 'ddp.group.*' --clause 'ddp.lifecycle.*'
        python -m spec_tests --impl THIS_FILE --clause 'ddp.schedule.*' --clause 'ddp.programs.*'
    5. Pack gradients into flat buckets: `ddp_bucketed`.
        python -m spec_tests --impl THIS_FILE --clause 'ddp.buckets.*'
    6. Send while the backward still computes; send every byte once, in one order.
        python -m spec_tests --impl THIS_FILE --level production --clause 'ddp.traffic.*'
        python -m spec_tests --impl THIS_FILE --level production --clause 'ddp.overlap.*'
        python -m spec_tests --impl THIS_FILE --level production --clause 'ddp.footprint.*'
        python -m spec_tests --impl THIS_FILE --level production --clause 'ddp.compile.*'

At the first level, what a course asks: `make check IMPL=THIS_FILE ARGS="--level course"`; what
the names promise: `make check IMPL=THIS_FILE`. Names and arguments are those of
spec_tests/contract/parallel.py; which clause says what stands in spec_tests/CLAUSES.md. Li et al.
2020, "PyTorch Distributed", tells the whole story. Delete a function that you do not want to
offer: it is then "not offered", as what raises nothing but NotImplementedError is. Once you begin
with `ddp_bucketed`, the clauses of tasks 1 to 4 judge it as well.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class ToDo(Exception):
    """This step is still to be done."""


def ddp(module: nn.Module, *, process_group: Any = None) -> nn.Module:
    """Replicate `module` over the group; every gradient becomes its own mean.

    Task 1:
      a. Find the group's first rank: `torch.distributed.get_global_rank(process_group, 0)`, or 0.
      b. Under `torch.no_grad()`, broadcast every parameter from it, frozen ones too, then every
         buffer. `dist.broadcast` wants contiguous memory: copy there and back where it is not.
      c. Return an `nn.Module` that holds `module` and hands `forward` on; its `parameters()` are
         the original ones, and `train()` and `eval()` reach it.
    Task 2, the first version: nothing more here, all in `finish_gradient_synchronization`.
    Task 6: a hook on each parameter (`register_post_accumulate_grad_hook`) launches an all-reduce
      with `async_op=True`, in an order that is the same on all ranks, and keeps its handle.
    """
    raise ToDo("task 1: all ranks take the parameters and buffers of the group's first rank")


def finish_gradient_synchronization(wrapped: nn.Module) -> None:
    """Called once after every backward outside of `no_sync`, before the optimizer.

    Task 2:
      a. For each parameter with `requires_grad`, each one once although it may have two names:
         all-reduce its gradient over the group and divide by the group's size.
      b. A parameter without a gradient on this rank may have one on another: agree on who has one
         before anybody sends, or send zeros. Never send what the others do not expect.
      c. A second call changes nothing: the gradients are means already. Every rank takes part in
         every collective all the same: where one alone skips it, the others wait for ever.
    Task 6: wait for the handles, then write the means back into `.grad`.
    """
    raise ToDo("task 2: every gradient becomes the mean over the group of the local gradients")


def no_sync(wrapped: nn.Module) -> AbstractContextManager[Any]:
    """Around forward *and* backward of a micro-batch: gradients add up here, nothing is sent.

    Task 3:
      a. Remember the present state, switch synchronisation off, give control to the body.
      b. In `finally`, restore the state *that was*: it nests, and the body may raise.
      c. The next backward outside averages what has accumulated, once.
    """
    raise ToDo("task 3: inside of no_sync gradients accumulate locally and nothing is sent")


def ddp_bucketed(
    module: nn.Module, *, bucket_size_mb: float, process_group: Any = None
) -> nn.Module:
    """As `ddp`, with the gradients packed into flat buckets of about `bucket_size_mb` MiB.

    Task 5:
      a. Plan at construction: parameters in reverse order, since the backward comes to the last
         ones first; a new bucket where the dtype changes or the size is reached; one parameter at
         least in each.
      b. Flatten a bucket's gradients, reduce the flat tensor, cut it up again in the same order.
      c. Launch buckets in the order of the plan, also when a later one is ready first: collectives
         are paired by position.
    """
    raise NotImplementedError(
        "task 5: gradients travel in flat buckets, planned alike on all ranks"
    )


# A toy of one Linear on two ranks, yours to change:
#     torchrun --standalone --nproc-per-node=2 THIS_FILE
if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)  # the ranks' weights differ until `ddp` makes them equal
    model = nn.Linear(2, 1)
    wrapped = ddp(model)
    print(f"rank {rank}: weight {model.weight.tolist()}, expected the same on both ranks")
    wrapped(torch.tensor([[[1.0, 0.0]], [[3.0, 2.0]]])[rank]).sum().backward()
    print(f"rank {rank}: gradient {model.weight.grad} after backward")
    finish_gradient_synchronization(wrapped)
    print(f"rank {rank}: gradient {model.weight.grad}, expected [[2., 1.]]")
    dist.destroy_process_group()
