"""Near-misses of sharded data parallelism, backward: wrong means, wrong rows of them."""

from __future__ import annotations

from typing import Any

from spec_tests.museum.card import Source, near_miss
from spec_tests.plain.fully_shard import PlainFsdp

FSDP = Source("spec_tests.plain.fsdp")
SHARD = Source("spec_tests.plain.fully_shard")
UNIT = Source("solution.parallel.fsdp.unit")

# --------------------------------------------------------------------------------------- backward


FSDP.near_miss(
    "fsdp.sum-for-mean",
    ("fsdp.backward.mean-gradient", "fsdp.training.equals-full-batch"),
    "- return own / (self.factor or self.mesh.size())",
    "+ return own / (self.factor or 1)",
    does="Sums gradients and does not divide.",
    seen="ReduceOp.SUM is the default.",
    unseen="Adam does not feel a constant factor.",
)

FSDP.near_miss(
    "fsdp.unties",
    "fsdp.backward.mean-gradient-of-any-model",
    "- found.setdefault(parameter, []).append((owner, name))",
    "+ if parameter in found:",
    "+     parameter = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)",
    "+ found[parameter] = [(owner, name)]",
    does="Gives each name of a tied weight a parameter of its own.",
    seen="pytorch issues 176225 and 176076; accelerate issue 4171.",
    unseen="The first forward is right: both copies are still equal.",
)

FSDP.near_miss(
    "fsdp.thaws",
    "fsdp.backward.frozen-in-a-whole-model",
    "- self.as_dtensor(local, parameter), requires_grad=parameter.requires_grad",
    "+ self.as_dtensor(local, parameter), requires_grad=True",
    does="Makes frozen weights trainable.",
    seen="`nn.Parameter(shard)` in four solutions of CS336; requires_grad is true by default.",
    unseen="Nothing is frozen when a model is trained from the start.",
)


@near_miss("fsdp.divides-in-finish", rejected_by="fsdp.accumulation.of-a-whole-model")
class DividesInFinish(PlainFsdp):
    """Divides every gradient in `finish_gradient_synchronization`.

    From: A sum is reduced in backward, and averaged once it has arrived.
    Unseen: One finish after each backward divides once.
    """

    @classmethod
    def functions(cls):
        return {**super().functions(), "fully_shard": None}

    def mean(self, flat):
        return super().mean(flat) * self.mesh.size()

    def finish(self):
        for piece in self.pieces:
            gradient: Any = piece.parameter.grad
            if gradient is not None:
                gradient._local_tensor.div_(self.mesh.size())


SHARD.near_miss(
    "fsdp.shards-the-rest",
    "fsdp.backward.replicated-rest",
    "- fully_shard(module, ignored_params=rest)",
    "+ fully_shard(module)",
    does="Shards the norms of a whole model as well.",
    seen="Ours, once: the course's test gathers the gradient of a norm and met a DTensor.",
    unseen="All numbers are right.",
)

FSDP.near_miss(
    "fsdp.scales-inputs",
    "fsdp.backward.inputs-keep-their-gradient",
    "  leaves, spec = tree_flatten((args, kwargs))",
    "+ for tensor in args:",
    "+     if isinstance(tensor, torch.Tensor) and tensor.is_leaf and tensor.requires_grad:",
    "+         tensor.register_hook(lambda gradient: gradient / self.size())",
    does="Divides the gradients of inputs as well.",
    seen="A global hook that divides every gradient.",
    unseen="Inputs of language models have no gradient.",
)

SHARD.near_miss(
    "fsdp.static-graph",
    "fsdp.backward.unused-unit",
    "+ for unit in self.run.units:",
    '+     unit.known = getattr(unit, "known", unit.in_backward)',
    "+     for piece in unit.pieces if not unit.known else ():",
    "+         piece.parameter.grad = piece.pending = None",
    "+         if piece.full is not None:",
    "+             piece.full.grad = None",
    "  missed = [u for u in self.run.units if not u.in_backward and u.reshard_after_backward]",
    does="Takes the first backward's units for those of all.",
    seen="Order and set of units recorded once.",
    unseen="Most models use all of their layers, always.",
)

FSDP.near_miss(
    "fsdp.overwrites-gradients",
    (
        "fsdp.backward.forwards-and-backwards-entangled",
        "fsdp.accumulation.of-a-whole-model",
    ),
    "  def assign(self, piece: Piece, shard: torch.Tensor) -> None:",
    "-     if piece.parameter.grad is None:",
    "+     if True:",
    does="Sets the sharded gradient where it ought to add.",
    seen="`parameter.grad = shard` at the end of the reduction.",
    unseen="Right for one micro-batch per step.",
)

FSDP.near_miss(
    "fsdp.frees-recomputed",
    "fsdp.backward.activation-checkpointing",
    "+ if self.in_backward:",
    "+     for piece in self.pieces:",
    "+         piece.full.data.zero_()",
    "  for tensor in tree_flatten(output)[0]:",
    does="Ends a recomputation as if it were a forward.",
    seen="The post-forward hook does not know that backward runs.",
    unseen="Tests do not checkpoint activations.",
    outcomes=("failed", "died"),
)

FSDP.near_miss(
    "fsdp.none-without-rows",
    "fsdp.backward.gradients-are-shards",
    "  def assign(self, piece: Piece, shard: torch.Tensor) -> None:",
    "+     if not shard.numel():",
    "+         return",
    does="Has no gradient on ranks that have no rows.",
    seen="`if shard.numel()` before the assignment.",
    unseen="Its peers wait for it in the next clipping.",
)


# --------------------------------------------------------------------------------------- training


FSDP.near_miss(
    "fsdp.fresh-parameters",
    ("fsdp.training.same-parameter-objects", "fsdp.training.equals-full-batch"),
    "  def reshard(self) -> None:",
    "+     for piece in self.pieces:",
    "+         old = piece.parameter",
    "+         piece.parameter = nn.Parameter(old.detach(), requires_grad=old.requires_grad)",
    "+         piece.parameter.grad = old.grad",
    does="Wraps the shard in a Parameter of its own each time.",
    seen="`setattr(module, name, nn.Parameter(shard))` after every pass.",
    unseen="The loss of the first steps is right, for nothing has moved.",
)

FSDP.near_miss(
    "fsdp.dithers",
    "fsdp.training.repeatable",
    "+ generator = torch.Generator()",
    "+ generator.seed()",
    "+ noise = torch.rand(own.shape, generator=generator).to(own.dtype) - 0.5",
    "+ own *= 1 + noise * 8 * torch.finfo(own.dtype).eps",
    "  return own / (self.factor or self.mesh.size())",
    does="Rounds stochastically with a generator that nobody seeds.",
    seen="Stochastic rounding in gradient compression.",
    unseen="The error is one unit in the last place.",
)


# ---------------------------------------------------------------------------------- compilation


FSDP.near_miss(
    "fsdp.reduces-while-tracing",
    "fsdp.compile.like-eager",
    "- dist.reduce_scatter_tensor(own, flat.reshape(-1), group=self.group)",
    '+ if getattr(self, "was_traced", False) and self.module._compiled_call_impl:',
    "+     own = flat[self.rank()].clone()",
    "+ else:",
    "+     dist.reduce_scatter_tensor(own, flat.reshape(-1), group=self.group)",
    "+ self.was_traced = True",
    does="Reduces the first gradients of a compiled module and no others.",
    seen="Hooks that were traced ran when the graph was made.",
    unseen="The first step is right.",
)

FSDP.near_miss(
    "fsdp.hooks-in-graphs",
    "fsdp.compile.one-graph",
    "- before, after = map(torch.compiler.disable, (self.pre_forward, self.post_forward))",
    "+ before, after = self.pre_forward, self.post_forward",
    does="Lets a compiler trace its hooks.",
    seen="Hooks that were written before there was a compiler.",
    unseen="With graph breaks it is right, only slow.",
)

UNIT.near_miss(
    "fsdp.dtype-of-the-first",
    "fsdp.forward.two-dtypes-of-a-unit",
    "- dtype = parameter.local.dtype",
    "+ dtype = self.parameters[0].local.dtype",
    does="Gathers and computes with all parameters of a unit in the dtype of its first.",
    seen="`next(module.parameters()).dtype`, kept for the unit",
    unseen="Layers of two dtypes fail at once; factors do not.",
)
