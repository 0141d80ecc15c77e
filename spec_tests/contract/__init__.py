"""The contract: everything that an implementer has to read.

An implementation is a module, a package or a file with any of these functions, by these
names and with these arguments. A function that it leaves out is reported as "not offered", never
as failed; the same holds for a function that raises NotImplementedError, and for a method of
`OPTIONAL_METHODS` that an object lacks. `solution/__init__.py` satisfies the contract as it stands,
and so does this file of five lines, as far as it goes:

    from torch.nn.parallel import DistributedDataParallel

    def ddp(module, *, process_group=None):
        return DistributedDataParallel(module, process_group=process_group)

    def no_sync(wrapped):
        return wrapped.no_sync()

Judge it with `python -m spec_tests --impl path/to/mine.py`. The ranks and their default group exist
when a function is called: keep a script's own `init_process_group` under `if __name__ ==
"__main__"`. Outside of the domain stated here a ValueError or NotImplementedError that names the
argument is always right.

Each docstring lists promises by level: `course` is what exercises ask, `correct` what the name
promises, `production` what PyTorch offers beyond. A level includes those before it. Then it lists
what may be refused. For such a condition an implementation is right, or raises an error: it does
not hang, and it does not go on with wrong values. Read the part that has the function you write:

    training.py   the loader, the loop, checkpoints
    models.py     attention, a language model
    parallel.py   replicas, a sharded optimizer
    sharding.py   fully_shard, the whole-model wrapper, clipping
    trainer.py    what owns forward, backward and optimizer step
    measure.py    estimates, measurements, traces

The clauses that judge each promise are in CLAUSES.md.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from spec_tests.contract import measure, models, parallel, sharding, trainer, training

FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: value
    for module in (parallel, sharding, trainer, training, models, measure)
    for name, value in vars(module).items()
    if isinstance(value, FunctionType)
}
"""Every function of the contract by name; its docstring lists what it promises."""

DEFAULTS: dict[str, Callable[..., Any]] = {
    "finish_gradient_synchronization": lambda wrapped: None,
    "full_parameters": lambda model: {
        name: p.full_tensor() if hasattr(p, "full_tensor") else p.detach()
        for name, p in model.named_parameters()
    },
}
"""What a function means where an implementation leaves it out; all others are not offered."""

OPTIONAL_METHODS: dict[str, tuple[str, ...]] = {
    "token_loader": ("state_dict", "load_state_dict"),
    "sharded_optimizer": ("add_param_group", "state_dict", "load_state_dict"),
    "fully_shard": (
        "unshard",
        "reshard",
        "set_requires_gradient_sync",
        "set_reshard_after_forward",
        "set_reshard_after_backward",
        "set_modules_to_forward_prefetch",
        "set_modules_to_backward_prefetch",
        "set_requires_all_reduce",
        "set_is_last_backward",
        "set_gradient_divide_factor",
        "set_unshard_in_backward",
    ),
    **dict.fromkeys(
        ("build_trainer", "build_zero1_trainer", "build_fsdp_trainer"),
        ("evaluate", "set_lr", "save", "load"),
    ),
}
"""Methods that may be absent, by the function that returns or changes the object.

A clause that calls an absent one is "not offered". All other methods of the contract must be there.
"""
