"""Right code that has built the tasks of a skeleton up to one, and raises ToDo in what comes later.

It is the shortest right code without what later tasks of `contract/skeletons` add: the clauses of a
task must not need that. Each entry of `CLASSES` is a plain class with lines changed, or with
methods taken out: `later` raises, and `nothing` is not noticed to be missing.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any, NoReturn

from spec_tests.museum.catalogue.data_files import NO_CHECKS
from spec_tests.museum.patching import patched_class, patches_of
from spec_tests.plain.attention import PlainAttention
from spec_tests.plain.ddp import PlainDdp
from spec_tests.plain.fully_shard import FSDPModule, PlainFsdp
from spec_tests.plain.loader import PlainLoader
from spec_tests.plain.train import PlainTrain
from spec_tests.plain.zero1 import PlainZero1


class ToDo(Exception):
    """A later task."""


def later(*args: Any, **kwargs: Any) -> NoReturn:
    """Do what a later task adds."""
    raise ToDo("a later task")


def nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing: what a later task adds is not noticed to be missing."""


def without(base: Any, /, *absent: str, **changes: Any) -> Any:
    """Return the class with some methods doing nothing and others changed."""
    return type(base.__name__, (base,), dict.fromkeys(absent, nothing) | changes)


def changed(base: Any, *difference: str) -> Any:
    """Return the class with some lines of its module changed, see `card.Source`."""
    return patched_class(base, patches_of(base.__module__, difference))


def raising(*names: str) -> dict[str, Any]:
    """Return methods that raise: those that are there are of a later task."""
    return dict.fromkeys(names, later)


# ---------------------------------------------------------------------------------------------- ddp

DDP_2 = without(
    *(PlainDdp, "register", "before_training_forward", "require_no_others"), no_sync=later
)
"""All is sent at the end, a parameter at a time; the group is always the whole world."""

# -------------------------------------------------------------------------------------------- zero1

STATE = raising("state_dict", "load_state_dict", "full_state")


def add_first_param_group(self, param_group):
    """Add a group before the first step; later groups are a later task."""
    if self.inner is not None:
        later()
    PlainZero1.add_param_group(self, param_group)


def show_options(self):
    """Show what the options are, and not the state."""
    for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
        outer.update({k: v for k, v in inner.items() if k != "params"})


# --------------------------------------------------------------------------------------------- fsdp


def offering(*built: str) -> dict[str, Any]:
    """Return the methods that a sharded module has; those that are not built raise."""
    names = [n for n in vars(FSDPModule) if not n.startswith("_") and n not in built]
    return {"offers": type("FSDPModule", (FSDPModule,), raising(*names))}


def adopt_whole(self):
    """Take over what the user has frozen."""
    for piece in self.pieces:
        if piece.full is not None:
            piece.full.requires_grad_(piece.parameter.requires_grad)


UNPREFETCHED = {
    "next_in_backward": lambda self: [],
    "class_of": classmethod(lambda cls, kind: type(f"FSDP{kind.__name__}", (cls.offers, kind), {})),
}
FSDP_3 = without(
    *(PlainFsdp, "recover", "require_no_others", "before_state_dict", "before_load", "after_step"),
    *("free",),
    refuses=False,
    is_fresh=lambda self: False,
    adopt=adopt_whole,
    **offering(),
    **UNPREFETCHED,
)
"""Gathers whenever it computes, and sees no update: nothing is kept that could be stale."""
FSDP_4 = without(
    PlainFsdp,
    **offering("unshard", "reshard", "set_reshard_after_backward", "set_reshard_after_forward"),
    **UNPREFETCHED,
)
"""Frees, and sees what changes shards."""

# ---------------------------------------------------------------------------------------- attention


HEADS_AND_WORK = (
    "- check(q, k, v)",
    "+ if q.ndim == 3 or q.shape[1] != k.shape[1]:",
    '+     raise NotImplementedError("task 4")',
    "...",
    "- end = rows.stop + k.shape[2] - q.shape[2] if causal else k.shape[2]",
    "+ end = k.shape[2]",
    "...",
)
"""Queries without heads, heads that share keys, and skipped tiles are left to a later task."""
BACKWARD = (
    "- found = backward(ctx.saved_tensors, do, dl, *ctx.options)",
    '+ raise NotImplementedError("task 3")',
    "...",
)
"""The backward is left to a later task, and says what a skeleton says."""
BLIND_ROWS = (
    "- safe = new.masked_fill(new == -torch.inf, 0.0)",
    "+ safe = new",
    "...",
    "- out[:, :, rows] = acc / norm.masked_fill(norm == 0.0, 1.0)[..., None]",
    "+ out[:, :, rows] = acc / norm[..., None]",
)
"""Rows that see nothing are left to a later task."""

# ------------------------------------------------------------------------------------------- loader

NO_STATE = raising("state_dict", "load_state_dict")
LOADER_2 = without(
    changed(
        PlainLoader,
        *NO_CHECKS,
        "...",
        '- found = [os.environ.get("RANK"), os.environ.get("WORLD_SIZE")]',
        '+ found = [os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")]',
    ),
    **NO_STATE,
)
"""Refuses no argument, and half an environment is taken for what it is not."""


def be_alone(self, *arguments):
    """Take what is for one rank alone."""
    if arguments[-2:] != (0, 1):
        later()
    LOADER_2.__init__(self, *arguments)


# ------------------------------------------------------------------------------------------ trainer

TRAINER_3 = (
    "- if norm != norm:  # the same on all ranks: gradients are",
    '-     raise RuntimeError("the gradient is NaN")',
)
"""Does not look whether a norm is finite."""
TRAINER_2 = (
    '- limit = float("inf") if max_norm is None else max_norm',
    "- norm = float(nn.utils.clip_grad_norm_(model.parameters(), limit))",
    *TRAINER_3,
    "+ if max_norm is not None:",
    '+     raise NotImplementedError("task 3")',
    "- if lr is not None:",
    "-     for group in optimizer.param_groups:",
    '-         group["lr"] = lr(number)',
    '- rate = float(optimizer.param_groups[0]["lr"])',
    "  optimizer.step()",
    "- records.append(",
    "-     {",
    '-         "loss": total(loss, is_wrapped) / tokens,',
    '-         "lr": rate,',
    '-         "grad_norm": norm,',
    '-         "tokens": tokens,',
    "-     }",
    "- )",
    "+ records.append({})",
)
"""Refuses to clip, sets no rate, records nothing."""

CLASSES: dict[tuple[str, int], Any] = {
    ("ddp", 1): without(PlainDdp, "register", "no_sync", finish=later),
    ("ddp", 2): DDP_2,
    ("ddp", 3): without(DDP_2, no_sync=PlainDdp.no_sync),
    ("zero1", 1): without(
        *(PlainZero1, "hand_in", "show"), add_param_group=add_first_param_group, **STATE
    ),
    ("zero1", 2): without(PlainZero1, show=show_options, **STATE),
    ("fsdp", 1): without(FSDP_3, pre_forward=later),
    ("fsdp", 2): without(FSDP_3, pre_backward=later),
    ("fsdp", 3): FSDP_3,
    ("fsdp", 4): FSDP_4,
    ("fsdp", 5): without(
        FSDP_4,
        by_dtype=lambda self: [[piece] for piece in self.pieces],  # a message for each parameter
        **offering(*(name for name in vars(FSDPModule) if "prefetch" not in name)),
    ),
    ("attention", 1): changed(PlainAttention, *HEADS_AND_WORK, *BACKWARD, *BLIND_ROWS),
    ("attention", 2): changed(PlainAttention, *HEADS_AND_WORK, *BACKWARD),
    ("attention", 3): changed(PlainAttention, *HEADS_AND_WORK),
    ("loader", 1): without(LOADER_2, __init__=be_alone),
    ("loader", 2): LOADER_2,
    ("loader", 3): without(PlainLoader, **NO_STATE),
    ("trainer", 2): changed(PlainTrain, *TRAINER_2),
    ("trainer", 3): changed(PlainTrain, *TRAINER_3),
}
LEFT_OUT = {"ddp": ("ddp_bucketed",)}
"""What a skeleton does not offer before a later task is begun."""


def functions(subject: str, task: int) -> dict[str, Any]:
    """Return the functions of the contract with the tasks of a subject built up to one."""
    found: dict[str, Any] = CLASSES[subject, task].functions()
    for name in LEFT_OUT.get(subject, ()):
        del found[name]
    if subject == "trainer":
        found |= PlainDdp.functions()
    if subject == "fsdp" and task < 5:
        found["MixedPrecisionPolicy"] = later
    if subject == "fsdp" and task < 3:
        found["finish_gradient_synchronization"] = later
    return found
