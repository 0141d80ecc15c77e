"""Near-misses of sharded data parallelism: what a rank keeps, and calls besides forward."""

from __future__ import annotations

import torch

from spec_tests.museum.card import Source, near_miss
from spec_tests.plain.fully_shard import PlainFsdp

FSDP = Source("spec_tests.plain.fsdp")
SHARD = Source("spec_tests.plain.fully_shard")
SCHEDULE = Source("solution.parallel.fsdp.schedule")

# ------------------------------------------------------------------------------------------- rows


FSDP.near_miss(
    "fsdp.deals-rows",
    ("fsdp.init.nothing-lost", "fsdp.forward.equals-plain"),
    "- return whole[self.rank() * rows : (self.rank() + 1) * rows]",
    "+ own = whole[self.rank() * rows : (self.rank() + 1) * rows]",
    "+ return whole[self.rank() :: self.size()][: own.shape[0]]",
    does="Deals rows out in turns and puts them together in blocks.",
    seen="`whole[rank::size]` next to an all-gather.",
    unseen="Shapes are right, and a random model with mixed-up rows trains.",
)

FSDP.near_miss(
    "fsdp.drops-tail",
    (
        "fsdp.init.nothing-lost-of-any-model",
        "fsdp.init.any-number-of-rows",
        "fsdp.training.equals-full-batch-of-any-model",
    ),
    "  rows = self.rows(whole)",
    "+ whole = whole.clone()",
    "+ whole[whole.shape[0] // self.size() * self.size() :] = 0",
    does="Keeps only as many rows as divide by the number of ranks.",
    seen="Floor division; the Efficient DL homework demands divisibility for it.",
    unseen="Hidden sizes are powers of two, vocabularies are not.",
)

FSDP.near_miss(
    "fsdp.balances-rows",
    "fsdp.init.rows-as-torch-chunk",
    "- return whole[self.rank() * rows : (self.rank() + 1) * rows]",
    "+ return whole.tensor_split(self.size())[self.rank()]",
    does="Deals rows out evenly under a placement that means torch.chunk.",
    seen="`numpy.array_split` and `tensor_split` deal so.",
    unseen="Sizes that divide are dealt out alike.",
)

FSDP.near_miss(
    "fsdp.shape-from-local",
    ("fsdp.init.parameters-are-dtensors", "fsdp.init.dtensor-metadata"),
    "- local, self.mesh, placements, shape=like.shape, stride=like.stride(), run_check=False",
    "+ local, self.mesh, placements, run_check=False",
    does="Leaves shape and stride to DTensor.from_local.",
    seen="flashoptim issue 6.",
    unseen="Right wherever the rows divide.",
)

FSDP.near_miss(
    "fsdp.bookkeeps-in-buffer",
    "fsdp.init.the-rest-stays",
    "  module.register_forward_hook(after, always_call=True)",
    '+ module.register_buffer("shard_rank", torch.tensor(self.rank()))',
    does="Keeps its rank in a buffer of the module.",
    seen="`register_buffer` as a place for state that moves with the module.",
    unseen="Nobody compares the keys of a checkpoint with the plain model's.",
)


# ---------------------------------------------------------------------------------------- forward


FSDP.near_miss(
    "fsdp.keeps-inference-tensors",
    "fsdp.forward.evaluation-leaves-no-trace",
    "- with torch.inference_mode(False), torch.no_grad():",
    "+ with torch.no_grad():",
    "      self.land_gather()",
    "...",
    "- with torch.inference_mode(False), torch.no_grad():",
    "+ with torch.no_grad():",
    "      sent = [(pieces, *self.gather(pieces)) for pieces in self.by_dtype()]",
    does="Cannot train after a first forward in inference mode.",
    seen="FSDP2 of torch 2.13, whose full parameters are made in the current mode.",
    unseen="Tests train first and evaluate later.",
)

FSDP.near_miss(
    "fsdp.rounds-in-backward",
    "fsdp.forward.resharding-changes-no-bit",
    "  own = own.to(self.compute_dtype(pieces[0]))",
    "+ if self.in_backward:",
    "+     own = own.bfloat16().to(own.dtype)",
    does="Gathers in bfloat16 for backward.",
    seen="A second code path for the gather in backward.",
    unseen="Integers survive it, and losses are those of forward.",
)

FSDP.near_miss(
    "fsdp.part-in-wrong-order",
    "fsdp.forward.resharding-to-a-part",
    "+ if type(self.reshard_after_forward) is int and self.in_backward:",
    "+     whole = whole.view(self.size(), -1)",
    "+     whole = whole.roll(self.reshard_after_forward, dims=0).reshape(-1)",
    "  return whole.view(self.size(), -1).split(lengths, dim=1)",
    "@ spec_tests.plain.fully_shard",
    "- refuses = True",
    "+ refuses = False",
    does="Puts the rows of a smaller world together in another order.",
    seen="Ranks of a sub-group taken for ranks of the world.",
    unseen="An int for `reshard_after_forward` is seldom given.",
)

SHARD.near_miss(
    "fsdp.casts-frozen-integers",
    "fsdp.precision.integers-are-not-cast",
    "- return super().compute_dtype(piece) if is_float else piece.parameter.dtype",
    "+ return super().compute_dtype(piece)",
    does="Gathers frozen integers in the dtype of the floating-point parameters.",
    seen="One dtype per unit, so that one message serves it.",
    unseen="Integers below 256 come through bfloat16 unchanged.",
)


@near_miss("fsdp.drops-tangents", rejected_by="fsdp.forward.under-a-transform")
class DropsTangents(PlainFsdp):
    """Hides `torch.func` from a whole forward, where its own gather alone cannot bear it.

    From: `torch._C._DisableFuncTorch` around too much.
    Unseen: The output is right; only its tangent is zero.
    """

    def pre_forward(self, module, args, kwargs):
        with torch._C._DisableFuncTorch():
            args, kwargs = super().pre_forward(module, args, kwargs)
        return tuple(torch.autograd.forward_ad.unpack_dual(arg)[0] for arg in args), kwargs

    def post_forward(self, module, args, output):
        with torch._C._DisableFuncTorch():
            return super().post_forward(module, args, output)


FSDP.near_miss(
    "fsdp.frees-under-its-caller",
    "fsdp.lifecycle.registered-method",
    "- self.num_running += 1",
    does="Ends a registered method as it ends a forward, in the middle of a forward as well.",
    seen="FSDP2 of torch 2.13, with reshard_after_forward=True.",
    unseen="A forward seldom computes on after the method that it calls.",
)

FSDP.near_miss(
    "fsdp.takes-a-name",
    "fsdp.init.names-of-the-model",
    "  self.find_root()",
    '+ object.__setattr__(self.module, "_schedule", self.run)',
    does="Sets `_schedule` in the module, which may have one.",
    seen="Ours, once, and each wrapper that keeps its state in `module._state`.",
    unseen="Toys have no attributes of their own.",
)

FSDP.near_miss(
    "fsdp.tells-nobody",
    "fsdp.backward.post-accumulate-hooks",
    "- self.tell(piece)",
    does="Assigns gradients to shards and calls no hook that waits for them.",
    seen="Ours, once: autograd calls such hooks for leaves of the graph, which shards are not.",
    unseen="Optimizers mostly step after the backward.",
)

SHARD.near_miss(
    "fsdp.shards-what-is-not-called",
    "fsdp.forward.layers-that-are-not-called",
    "- return [layer for layer in layers if layer not in inside]",
    "+ return layers",
    does="Makes a unit of every Linear, also of one whose weight others read.",
    seen="nn.MultiheadAttention and its out_proj.",
    unseen="Course models have attention of their own.",
)

FSDP.near_miss(
    "fsdp.local-for-shard",
    "fsdp.refusals.unregistered-method",
    "  owner._parameters[name] = piece.parameter if sharded else piece.full",
    "+ if sharded and self.gathered is not None:",
    "+     owner._parameters[name] = nn.Parameter(piece.local)",
    does="Leaves plain rows in the module between steps, where a DTensor would object.",
    seen="Shards as plain Parameters, as courses have them: an embedding finds its first rows.",
    unseen="A wrong shape raises in most layers.",
)

FSDP.near_miss(
    "fsdp.reduces-ignored",
    "fsdp.traffic.ignored-parameters",
    "  self.run.order.clear()",
    "+ for parameter in self.module.parameters():",
    "+     if id(parameter) in self.ignored and parameter.grad is not None:",
    "+         dist.all_reduce(parameter.grad)",
    "+         parameter.grad /= dist.get_world_size()",
    does="Averages the gradients of ignored parameters.",
    seen="A loop over all parameters at the end of backward, for those that no hook has reached.",
    unseen="With equal batches on all ranks the mean is each one's own.",
)

SCHEDULE.near_miss(
    "fsdp.writes-into-a-dataclass",
    "fsdp.precision.callers-inputs",
    "- changed = _copied(values) if changed is values else changed",
    "+ changed = values",
    does="Puts the cast inputs into the caller's own dataclass.",
    seen="setattr on an object that should be a copy",
    unseen="Few callers look at a batch again; the next epoch's is narrow already.",
)

SCHEDULE.near_miss(
    "fsdp.leaves-the-next-on-its-way",
    "fsdp.footprint.shorter-evaluation",
    "          self._leave(unit, has_backward=torch.is_grad_enabled())",
    "+ if torch.is_grad_enabled():",
    "- self._drop_unused()",
    "+     self._drop_unused()",
    does="Discards an unused prefetch after training forwards alone.",
    seen="the end of a pass, which hangs on its backward",
    unseen="Evaluations use all layers, nearly always.",
)

SCHEDULE.near_miss(
    "fsdp.frees-what-it-reaches",
    "fsdp.footprint.kept-for-nothing",
    "- if unit.is_in_backward or unit.state is not UnitState.SHARDED or unit.has_gradients:",
    "+ if unit.is_in_backward or unit.has_gradients:",
    does="At the end of a backward frees only the units that the backward has been through.",
    seen="a hook behind each unit's gradients, and nothing for those that have none",
    unseen="The next forward frees it, if there is one before memory ends.",
)
