"""Near-misses that no single situation shows: each needs several calls in an order of its own."""

from __future__ import annotations

from spec_tests.museum.card import Source

DDP = Source("spec_tests.plain.ddp")
FSDP = Source("spec_tests.plain.fsdp")
ZERO1 = Source("spec_tests.plain.zero1")

DDP.near_miss(
    "ddp.rolls-back",
    "ddp.programs.any-situation",
    "- return self.module(*args, **kwargs)",
    "+ try:",
    "+     return self.module(*args, **kwargs)",
    "+ except Exception:",
    "+     for parameter in self.trainable:",
    '+         parameter.grad = getattr(parameter, "kept", None)',
    "+     raise",
    "...",
    "  parameter.grad.copy_(mean)",
    "+ parameter.kept = mean",
    does="After an exception in forward, restores the gradients of the last reduction.",
    seen="Retries after out of memory that go back to a snapshot older than zero_grad.",
    unseen="Wrong only where zero_grad came between the snapshot and the exception.",
)

ZERO1.near_miss(
    "zero1.rates-of-the-last-step",
    "zero1.programs.any-situation",
    "- self.hand_in()  # what `show` would bring back below",
    "+ pass",
    does="When a group is added, shows the options that the inner optimizer had in its last step.",
    seen="ours, until drawn programs met it, and `plain` the same.",
    unseen="Rates change before a step, and groups are added at the start.",
)

ZERO1.near_miss(
    "zero1.loads-over",
    "zero1.state.load-replaces",
    "+ before = dict(self.state)",
    '  super().load_state_dict({**state_dict, "state": kept})',
    "+ self.state.update({p: e for p, e in before.items() if p not in self.state})",
    does="Loads entry by entry, over the state that is there.",
    seen="ZeroRedundancyOptimizer of torch 2.13: an empty state leaves the old moments standing.",
    unseen="Tests load into a new optimizer, or a state that has every entry.",
)

FSDP.near_miss(
    "fsdp.frees-when-all-went-well",
    "fsdp.lifecycle.fresh-after-exception",
    "- return bool(self.gathered == self.version())",
    "+ return True",
    "@ spec_tests.plain.fully_shard",
    "+ if output is None:",
    "+     return None",
    "  if is_dataclass(output) and not isinstance(output, dict):",
    does="Full weights that an interrupted forward had gathered serve the next one too.",
    seen="FSDP2 of torch 2.13: hooks that an exception passes by.",
    unseen="Wrong only where a step of the optimizer comes between the two.",
)
