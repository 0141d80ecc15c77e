"""Near-misses of the sharded optimizer: what it hands on to the optimizer inside, or drops."""

from __future__ import annotations

import torch

from spec_tests.museum.card import Source, near_miss
from spec_tests.museum.catalogue.zero1_benign import Elementwise

ZERO1 = Source("spec_tests.plain.zero1")

ZERO1.near_miss(
    "zero1.drops-keywords",
    "zero1.step.keywords",
    "- def step(self, closure: Any = None) -> Any:",
    "+ def step(self, closure: Any = None, **others: Any) -> Any:",
    does="Takes further keywords of `step`, and hands none of them on.",
    seen="`def step(self, closure=None, **kwargs)`, as CS336's exercise has it, in a solution.",
    unseen="The steps of Adam and SGD take no other keyword than the closure.",
)

ZERO1.near_miss(
    "zero1.clears-groups",
    "zero1.step.counts-in-groups",
    '- inner.update({k: v for k, v in outer.items() if k != "params"})',
    '+ own = inner["params"]',
    "+ inner.clear()",
    '+ inner.update({**outer, "params": own})',
    "...",
    '- outer.update({k: v for k, v in inner.items() if k != "params"})',
    '+ outer.update({k: v for k, v in inner.items() if k not in ("params", "steps")})',
    does="Empties the inner groups before it copies the outer ones.",
    seen="`local_group.clear(); local_group.update(group)` in each step of a solution of CS336.",
    unseen="Adam and SGD keep nothing in their groups.",
)

ZERO1.near_miss(
    "zero1.clears-to-zero",
    "zero1.step.after-zero-grad",
    "+ def zero_grad(self, set_to_none: bool = False) -> None:",
    "+     super().zero_grad(set_to_none)",
    "  def exchange(self) -> None:",
    does="`zero_grad` writes zeros unless None is asked for.",
    seen="The default of torch before 2.0, in a solution of CS336.",
    unseen="Where every parameter is used in every step, zeros are as good as None.",
)


@near_miss(
    "zero1.pads-in-single",
    rejected_by="zero1.step.half-precision",
    outcomes=("failed", "hang", "died"),
)
class PadsInSingle(Elementwise):
    """Pads its stretch with float32 zeros, which makes the whole stretch float32.

    From: `torch.zeros(n)` without a dtype beside a parameter in bfloat16, in a solution of CS336.
    Unseen: In float32, or where the ranks divide every size, there is nothing to see.
    """

    def padded(self, stretch, number):
        return torch.cat([stretch, torch.zeros(number)]) if number else stretch


@near_miss("zero1.steps-on-stretches", rejected_by="zero1.step.whole-tensors")
class StepsOnStretches(Elementwise):
    """Gives every optimizer flat stretches of the parameters, also one that needs whole tensors.

    From: Equal stretches, as in two solutions of CS336.
    Unseen: SGD and Adam look at each element by itself; Adafactor, LAMB and Muon do not.
    """

    def takes(self, kind):
        return True


ZERO1.near_miss(
    "zero1.adds-bare-groups",
    ("zero1.groups.added-rate", "zero1.groups.added-later"),
    "- super().add_param_group(param_group)",
    '+ bare = {"params": param_group["params"]}',
    "+ super().add_param_group(param_group if self.inner is None else bare)",
    does="Keeps the parameters of a group that is added, and not its options.",
    seen='`super().add_param_group({"params": shards})`, in a solution of CS336.',
    unseen="Groups that are added have the rate of the others.",
)

ZERO1.near_miss(
    "zero1.steps-under-no-grad",
    "zero1.step.closure",
    "+ @torch.no_grad()",
    "  def step(self, closure: Any = None) -> Any:",
    does="Switches gradients off around all of `step`, the closure among it.",
    seen="`@torch.no_grad()` above `step`, in solutions of CS336.",
    unseen="PyTorch's optimizers switch them on for the closure; most loops pass none.",
)

ZERO1.near_miss(
    "zero1.idle-for-ever",
    "zero1.programs.any-situation",
    "  self.defaults = self.inner.defaults",
    '+ self.is_idle = not any(group["params"] for group in self.inner.param_groups)',
    "...",
    "  def update(self, closure: Any) -> Any:",
    "+     if self.is_idle:",
    "+         return None if closure is None else closure()",
    does="Builds its inner optimizer where it owns something at first, and elsewhere never.",
    seen="`self.inner = None` on a rank without parameters, and `if self.inner` in `step`.",
    unseen="With fewer ranks than parameters every rank owns one from the beginning.",
)
