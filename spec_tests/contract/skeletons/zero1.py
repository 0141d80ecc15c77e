"""ZeRO-1: an optimizer whose state is divided over the ranks.

Adam keeps two numbers per parameter, and in plain data parallelism every rank keeps all of
them. With ZeRO-1 each rank keeps the state of a part, updates that part, and sends the new
values to the others. Gradients arrive already averaged: this is about the optimizer alone.

Do one task after the other; the clauses of a task say when it is done:

    1. Own a part, step it, and tell the others.
        python -m spec_tests --impl THIS_FILE --clause 'zero1.step.*'
    2. Keep the groups of options live: schedulers change them between steps.
        python -m spec_tests --impl THIS_FILE --clause 'zero1.groups.*' --clause 'zero1.group.*'
    3. Divide the state, give it whole for a checkpoint, take it back at any number of ranks.
        python -m spec_tests --impl THIS_FILE --clause 'zero1.state.*' --clause 'zero1.programs.*'
    4. Send each value once, in one order; keep a fair share; refuse ranks that differ.
        python -m spec_tests --impl THIS_FILE --level production --clause 'zero1.traffic.*'
        python -m spec_tests --impl THIS_FILE --level production --clause 'zero1.footprint.*'
        python -m spec_tests --impl THIS_FILE --clause 'zero1.schedule.*'
        python -m spec_tests --impl THIS_FILE --level production --clause 'zero1.refusals.*'
        python -m spec_tests --impl THIS_FILE --level production --clause 'zero1.compile.*'

All of it: `make check IMPL=THIS_FILE`; what a course asks: `ARGS="--level course"` besides.
Names and arguments are those of spec_tests/contract/parallel.py. Rajbhandari et al. 2020, "ZeRO",
section 5.1.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer


class ToDo(Exception):
    """This step is still to be done."""


def sharded_optimizer(
    params: Iterable[Any],
    optimizer_cls: type[Optimizer],
    *,
    process_group: Any = None,
    **kwargs: Any,
) -> Optimizer:
    """A `torch.optim.Optimizer` over all of `params` that holds the state of a part.

    Return an instance of a subclass of `Optimizer`:

    Task 1:
      a. `Optimizer.__init__(params, defaults)` understands groups; it calls `add_param_group`.
      b. Give every parameter one owner, by a rule that needs no message: all ranks see the same
         parameters in the same order. Whole parameters, dealt to whoever has least, will do.
      c. Build `optimizer_cls` over what this rank owns, if anything.
      d. `step(closure, **kwargs)`: call the closure first; step the inner optimizer; then broadcast
         every trainable parameter from its owner, in the same order everywhere, and wait.
    Task 2:
      a. Before each step copy the options of the outer groups (lr, betas, ...) to the inner ones;
         after it take back what the inner optimizer wrote into its own.
      b. `add_param_group` may be called later: hand the new parameters out by the same rule.
      c. `zero_grad` clears all gradients, owned or not. That one is inherited.
    Task 3:
      a. `.state` is the inner optimizer's: what this rank owns and no more.
      b. `load_state_dict` takes the unsharded optimizer's state and keeps what is owned;
         `state_dict` either gives the whole or raises, never a part that looks whole.
    """
    raise ToDo("task 1: every parameter has one owner, which steps it and sends the new value")


def full_optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """On every rank, the state dict that the unsharded optimizer would have.

    Task 3:
      a. Gather the owned states (`dist.all_gather_object` is the shortest way).
      b. Number the parameters as the unsharded optimizer does: in order, over all groups.
      c. Changes nothing: no step, no state that was not there.
    """
    raise ToDo("task 3: the parts of the state, put together and numbered as if never divided")


# A toy of one Linear on two ranks, yours to change:
#     torchrun --standalone --nproc-per-node=2 THIS_FILE
if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    expected = [(p - 0.5).tolist() for p in model.parameters()]  # a rate of 0.5, gradients of 1
    optimizer = sharded_optimizer(model.parameters(), torch.optim.SGD, lr=0.5, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()  # equal on all ranks, as after an average
    optimizer.step()
    print(f"rank {rank}: {[p.tolist() for p in model.parameters()]}, expected {expected}")
    print(f"rank {rank}: state of {len(optimizer.state)} parameters, expected 1 of the 2")
    dist.destroy_process_group()
