"""Near-misses of the sharded optimizer: who updates what, and parameter groups."""

from __future__ import annotations

from spec_tests.museum.card import Source

ZERO1 = Source("spec_tests.plain.zero1")

ZERO1.near_miss(
    "zero1.steps-alone",
    ("zero1.state.divided", "zero1.step.equal-on-all-ranks", "zero1.footprint.state-is-a-share"),
    "- return self.owners[parameter] == self.rank()",
    "+ return True",
    "...",
    "- self.exchange()",
    does="Is the plain optimizer on every rank.",
    seen="CS336's tests of the sharded optimizer accept it: all ranks see the same data.",
    unseen="Weights are right as long as gradients are equal to the bit.",
)

ZERO1.near_miss(
    "zero1.averages-weights",
    ("zero1.step.one-owner-decides", "zero1.traffic.one-copy-per-step"),
    "- return self.owners[parameter] == self.rank()",
    "+ return True",
    "...",
    "- dist.broadcast(whole, group=self.group, group_src=owner)",
    "+ dist.all_reduce(whole, group=self.group)",
    "+ whole /= self.size()",
    does="Updates everything on every rank and averages the weights.",
    seen="A repair for replicas that drifted apart.",
    unseen="With equal gradients the average equals each rank's weights.",
)

ZERO1.near_miss(
    "zero1.sends-piece-by-piece",
    "zero1.traffic.few-messages",
    does="Broadcasts every parameter in a message of its own.",
    seen="A loop over parameters; ZeroRedundancyOptimizer's default",
    unseen="All weights are right, and one machine's latency is small.",
)

ZERO1.near_miss(
    "zero1.fills-none",
    "zero1.step.skips-absent-gradients",
    "  def update(self, closure: Any) -> Any:",
    "+     for parameter in self.owners:",
    "+         if parameter.grad is None and parameter.requires_grad:",
    "+             parameter.grad = torch.zeros_like(parameter)",
    does="Takes zero for a gradient that is None.",
    seen="Megatron-LM issue 5974: flat buffers have no None.",
    unseen="Every parameter is used in every step.",
)

ZERO1.near_miss(
    "zero1.thaws-frozen",
    "zero1.step.frozen-untouched",
    "  def update(self, closure: Any) -> Any:",
    "+     for parameter in self.owners:",
    "+         if parameter.grad is None and not parameter.requires_grad:",
    "+             parameter.grad = torch.zeros_like(parameter)",
    does="Takes zero for the gradient of a frozen parameter, and so decays it.",
    seen="Flat buffers over all parameters.",
    unseen="Without weight decay nothing is seen.",
)

ZERO1.near_miss(
    "zero1.leaves-out-frozen",
    "zero1.step.thawed-later",
    '- return {**group, "params": [p for p in group["params"] if self.owned(p)]}',
    '+ mine = [p for p in group["params"] if self.owned(p) and p.requires_grad]',
    '+ return {**group, "params": mine}',
    does="Has no optimizer for parameters that were frozen at construction.",
    seen="`[p for p in params if p.requires_grad]`.",
    unseen="Few train in stages, and parameters that stay frozen are right.",
)

ZERO1.near_miss(
    "zero1.refuses-to-own-nothing",
    "zero1.step.more-ranks-than-parameters",
    "  def update(self, closure: Any) -> Any:",
    '+     if not any(group["params"] for group in self.inner.param_groups):',
    '+         raise ValueError("optimizer got an empty parameter list")',
    does="Raises on a rank that owns no parameter.",
    seen="torch.optim refuses an empty list, on one rank alone.",
    unseen="Models have more parameters than tests have ranks.",
)

ZERO1.near_miss(
    "zero1.shares-its-owners",
    "zero1.step.two-optimizers",
    "  self.owners[parameter] = owner",
    "+ PlainZero1.last = self.owners",
    "...",
    "- for parameter, owner in self.owners.items():",
    "+ for parameter, owner in PlainZero1.last.items():",
    does="Sends the parameters of whichever optimizer was made last.",
    seen="`owners: dict = {}` in the class in place of the constructor, in a solution of CS336.",
    unseen="A program has one optimizer.",
)

ZERO1.near_miss(
    "zero1.drops-wait",
    "zero1.step.waits-for-late-owners",
    "  for parameter, owner in self.owners.items():",
    "-     self.take(parameter, owner)",
    "+     sent = dist.broadcast(parameter.detach(), None, self.group, True, group_src=owner)",
    '+     self.flying = [*getattr(self, "flying", []), sent]',
    "...",
    '  """Options that were changed outside."""',
    '+ for handle in self.__dict__.pop("flying", []):  # before the next step changes them',
    "+     handle.wait()",
    does="Returns while the exchange is under way.",
    seen="DeepSpeed issues 5545, 6351 and 8061: the exchange overlaps with the next forward.",
    unseen="With punctual ranks small messages arrive in time.",
)

ZERO1.near_miss(
    "zero1.flattens-in-memory-order",
    "zero1.step.layouts",
    "- whole = parameter.detach().contiguous()",
    "+ whole = parameter.detach().as_strided((parameter.numel(),), (1,)).clone()",
    "...",
    "- parameter.copy_(whole)",
    "+ parameter.copy_(whole.view(parameter.shape))",
    does="Sends a parameter as it lies in memory and reads it row by row.",
    seen="A flat view of the storage in place of the tensor.",
    unseen="Parameters are contiguous, nearly always.",
)

ZERO1.near_miss(
    "zero1.sends-what-lies-between",
    "zero1.step.parts-of-larger-tensors",
    "- whole = parameter.detach().contiguous()",
    "+ whole = parameter.detach()",
    does="Broadcasts each parameter itself, whatever its strides.",
    seen="ZeroRedundancyOptimizer; gloo takes such a tensor for a contiguous one.",
    unseen="A transposed one fills its memory, and is right.",
)

ZERO1.near_miss(
    "zero1.updates-each-name",
    "zero1.step.tied-parameter",
    "  loss = self.update(closure)",
    "+ for group in self.inner.param_groups:",
    '+     for parameter in group["params"]:',
    "+         if parameter.dim() == 2 and parameter.shape[0] == parameter.shape[1]:",
    '+             parameter.data.sub_(group["lr"] * parameter.grad)',
    does="Updates a tied parameter once for each of its names.",
    seen="Parameters are taken with remove_duplicate=False and dealt by name.",
    unseen="No test model ties anything; a famous one that says so does not.",
)

ZERO1.near_miss(
    "zero1.copies-options-once",
    ("zero1.groups.live", "zero1.groups.schedulers", "zero1.groups.rate-set-by-closure"),
    '  """Options that were changed outside."""',
    "+ return",
    does="Copies options at construction.",
    seen="pytorch issue 60284: the inner optimizer's groups go stale.",
    unseen="Tests train at a constant rate.",
)

ZERO1.near_miss(
    "zero1.drops-empty-groups",
    "zero1.groups.own-options",
    '  """Options that were changed outside."""',
    "- for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):",
    '+ kept = [group for group in self.inner.param_groups if group["params"]]',
    "+ for outer, inner in zip(self.param_groups, kept, strict=False):",
    does="Pairs outer groups with those inner ones that are not empty on this rank.",
    seen="`if own: groups.append(...)`, and options copied by position.",
    unseen="A group that has parameters on every rank.",
)

ZERO1.near_miss(
    "zero1.clears-own-gradients",
    "zero1.groups.zero-grad",
    "+ def zero_grad(self, set_to_none: bool = True) -> None:",
    "+     self.inner.zero_grad(set_to_none)",
    "  def exchange(self) -> None:",
    does="`zero_grad` clears only the gradients of parameters that the rank owns.",
    seen="`zero_grad` is handed to the inner optimizer.",
    unseen="Tests clear through the model.",
)

ZERO1.near_miss(
    "zero1.owners-of-the-world",
    "zero1.group.keeps-to-itself",
    "- return dist.get_world_size(self.group)",
    "+ return dist.get_world_size()",
    "...",
    "- return dist.get_rank(self.group)",
    "+ return dist.get_rank()",
    "...",
    "- dist.broadcast(whole, group=self.group, group_src=owner)",
    "+ dist.broadcast(whole, src=owner)",
    does="Deals to, and broadcasts over, the world in place of the group.",
    seen="`dist.get_world_size()` and no group in the broadcast.",
    unseen="Tests have one group.",
    outcomes=("failed", "hang", "died"),
)

ZERO1.near_miss(
    "zero1.compares-nothing",
    ("zero1.refusals.unequal-ranks", "zero1.refusals.sparse"),
    does="Trusts that all ranks were given the same, and that it is dense.",
    seen="ZeroRedundancyOptimizer does, and so does every exercise.",
    unseen="Ranks run the same script.",
    outcomes=("failed", "hang", "died"),
)

ZERO1.near_miss(
    "zero1.keeps-copies-of-weights",
    "zero1.step.weights-of-others",
    '+ for parameter, copied in getattr(self, "copies", {}).items():',
    "+     parameter.data.copy_(copied)",
    "  loss = self.update(closure)",
    "...",
    "  self.exchange()",
    "+ self.copies = {p: p.detach().clone() for p in self.owners}",
    does="Updates copies of the weights that it made at the end of the last step.",
    seen="A flat master copy of float32 weights, as mixed precision needs one.",
    unseen="Nobody else writes the weights of a plain training loop.",
)

ZERO1.near_miss(
    "zero1.exchanges-when-eager",
    "zero1.compile.step",
    "- self.exchange()",
    "+ if not torch.compiler.is_compiling():",
    "+     self.exchange()",
    does="Sends nothing in a step that is traced.",
    seen="`if not torch.compiler.is_compiling()` around calls that break a graph.",
    unseen="Each rank updates its own parameters; the others keep their first values.",
)
