"""Right but unusual sharded modules, and near-misses at the edges: other worlds, odd moments."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from spec_tests.museum.card import Source, benign, near_miss
from spec_tests.plain.fully_shard import PlainFsdp

FSDP = Source("spec_tests.plain.fsdp")
SHARD = Source("spec_tests.plain.fully_shard")

FSDP.benign(
    "benign.fsdp-piecemeal",
    "- return list(found.values())",
    "+ return [[piece] for piece in self.pieces]",
    "...",
    "  def prefetch(self) -> None:",
    "+     return",
    "...",
    "- return bool(self.gathered == self.version())",
    "+ return False",
    "...",
    "- return whole, dist.all_gather_into_tensor(whole, own, group=self.group, async_op=True)",
    "+ parts = whole.view(self.size(), -1)",
    "+ parts[self.rank()] = own",
    "+ for rank, part in enumerate(parts):",
    "+     dist.broadcast(part, group_src=rank, group=self.group)",
    "+ return whole, Done()",
    "...",
    "- self.reduce([p for p in pieces if p.pending is not None])",
    "+ for piece in pieces:",
    "+     self.reduce([] if piece.pending is None else [piece])",
    "...",
    "- return torch.cat(blocks, dim=1)",
    "+ return torch.cat(blocks, dim=1) / self.size()",
    "...",
    "- own = flat.new_empty(flat.numel() // self.size())",
    "- dist.reduce_scatter_tensor(own, flat.reshape(-1), group=self.group)",
    "+ whole = flat.reshape(-1).clone()",
    "+ dist.all_reduce(whole, group=self.group)",
    "+ own = whole.view(self.size(), -1)[self.rank()].clone()",
    "...",
    "- return own / (self.factor or self.mesh.size())",
    "+ return own / (self.factor or self.mesh.size() // self.size())",
    does="Parameter by parameter, all-reduce and slice, divides first.",
)

FSDP.benign(
    "benign.fsdp-refuses-after-failure",
    "- found.setdefault(parameter, []).append((owner, name))",
    "+ if parameter in found:",
    '+     raise ValueError(f"{name} is a parameter of two names")',
    "+ found[parameter] = [(owner, name)]",
    "...",
    "- return whole, dist.all_gather_into_tensor(whole, own, group=self.group, async_op=True)",
    "+ dist.all_to_all_single(whole, own.repeat(self.size()), group=self.group)",
    "+ return whole, Done()",
    "...",
    "- own = flat.new_empty(flat.numel() // self.size())",
    "- dist.reduce_scatter_tensor(own, flat.reshape(-1), group=self.group)",
    "+ parts = torch.empty_like(flat.reshape(-1))",
    "+ dist.all_to_all_single(parts, flat.reshape(-1), group=self.group)",
    "+ own = parts.view(self.size(), -1).sum(dim=0)",
    "@ spec_tests.plain.fully_shard",
    "  if self.is_root and self.run.is_callback_queued:",
    '+     raise RuntimeError("the last backward was interrupted: build the model anew")',
    "...",
    "- def unshard(self, async_op: bool = False) -> Any:",
    "+ def unshard(self, async_op: bool = False, /) -> Any:",
    "...",
    "  def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:",
    '+     raise ValueError("expected no hint: units are gathered in the last order")',
    does="Errors for a tie, a hint, after an interrupted backward; sends by all-to-all alone.",
)


@benign(
    "benign.fsdp-gathers-ahead",
    also=(
        *("fsdp.traffic.any-world-size", "fsdp.traffic.copies-per-*", "fsdp.traffic.frozen-*"),
        *("fsdp.traffic.i*", "fsdp.traffic.one-gather-per-unit", "fsdp.traffic.*recursive"),
        *("fsdp.traffic.s*", "fsdp.traffic.wait-after-reshard"),
        *("fsdp.order.gathers-*", "fsdp.order.reduces-*", "fsdp.order.hints-*"),
        *("fsdp.precision.sends-in-its-dtype", "fsdp.footprint.any-world-size"),
    ),
)
class GathersAhead(PlainFsdp):
    """Launches gathers a phase ahead: the backward's first two in forward, the forward's in a step.

    What an optimizer or a load writes after that is noticed, and gathered again.
    """

    def post_forward(self, module, args, output):
        output = super().post_forward(module, args, output)
        if self.is_root and torch.is_grad_enabled() and not self.in_backward:
            for unit in self.run.order[:-3:-1]:
                unit.prefetch()
        return output

    def after_step(self, groups):
        super().after_step(groups)
        if self.run is None or self is not self.run.units[-1]:
            return
        own = {id(piece.parameter) for unit in self.run.units for piece in unit.pieces}
        if all(id(parameter) in own for group in groups for parameter in group["params"]):
            self.prefetch()  # one launch for each step: in one order on all ranks


class GatherFlat(torch.autograd.Function):
    """A flat tensor out of its shards; backward gives this rank's part of the mean gradient."""

    @staticmethod
    def forward(ctx, own):
        whole = own.new_empty(own.numel() * dist.get_world_size())
        dist.all_gather_into_tensor(whole, own)
        return whole

    @staticmethod
    def backward(ctx, gradient):
        wide = gradient.contiguous().to(torch.promote_types(gradient.dtype, torch.float32))
        parts = [torch.empty_like(wide) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, wide)  # and added up in the order of ranks
        mean = torch.stack(parts).sum(dim=0) / len(parts)
        return mean.view(len(parts), -1)[dist.get_rank()].to(gradient.dtype, copy=True)


class FlatLayer(nn.Module):
    """A Linear or Embedding whose weight is kept as a flat shard, and the bias with it if it packs.

    Computed again in backward, so that autograd keeps no full weight in between.
    """

    def __init__(self, layer, compute_dtype, packs):
        super().__init__()
        weight, self.bias = layer.weight, getattr(layer, "bias", None)
        self.shapes = {"weight": weight.shape}
        parts = [weight.detach().reshape(-1)]
        if packs and self.bias is not None and self.bias.requires_grad is weight.requires_grad:
            self.shapes["bias"] = self.bias.shape
            parts.append(self.bias.detach())
            self.bias = None
        size, numel = dist.get_world_size(), sum(part.numel() for part in parts)
        padded = torch.cat([*parts, weight.new_zeros(-numel % size)])
        self.compute_dtype = compute_dtype
        self.shard = nn.Parameter(
            padded.view(size, -1)[dist.get_rank()].clone(), requires_grad=weight.requires_grad
        )
        self.is_embedding = isinstance(layer, nn.Embedding)

    def forward(self, x):
        return checkpoint(self.compute, x, use_reentrant=False)

    def full(self, shard):
        """The full tensors by name, the bias as well."""
        whole = GatherFlat.apply(shard)
        found = {} if self.bias is None else {"bias": self.bias}
        for name, shape in self.shapes.items():
            found[name], whole = whole[: shape.numel()].view(shape), whole[shape.numel() :]
        return found

    def compute(self, x):
        """The layer's forward with all rows of its weight."""
        dtype = self.compute_dtype or self.shard.dtype
        full = {name: value.to(dtype) for name, value in self.full(self.shard.to(dtype)).items()}
        if self.is_embedding:
            return nn.functional.embedding(x, full["weight"])
        return nn.functional.linear(x, full["weight"], full.get("bias"))


@benign("benign.fsdp-flat-shards")
class FlatModel(nn.Module):
    """The whole-model shape without DTensors: flat shards of rows that divide, recomputation.

    Parameters come in another order than those of the plain model.
    """

    packs = False

    def __init__(self, module, compute_dtype):
        super().__init__()
        self.names = [name for name, _ in module.named_parameters()]
        for name, layer in module.named_modules():
            is_layer = isinstance(layer, nn.Linear | nn.Embedding)
            if is_layer and (not name or layer.weight.shape[0] % dist.get_world_size()):
                raise ValueError(f"{name or module}: expected layers of rows that the ranks divide")
        if len(self.names) != len(list(module.named_parameters(remove_duplicate=False))):
            raise ValueError("module: expected no tied weights, got some; untie them first")
        self.inner = module
        for name, layer in list(module.named_modules()):
            if isinstance(layer, nn.Linear | nn.Embedding):
                owner = module.get_submodule(name.rpartition(".")[0])
                setattr(owner, name.rpartition(".")[2], FlatLayer(layer, compute_dtype, self.packs))

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)

    def finish(self):
        """Average what is replicated."""
        for name, parameter in self.named_parameters():
            if not name.endswith(".shard") and parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

    @classmethod
    def functions(cls):
        """Return the contract's functions for flat shards."""
        return {
            "fsdp": lambda module, *, compute_dtype=None: cls(module, compute_dtype),
            "full_parameters": lambda model: model.full_parameters(),
            "finish_gradient_synchronization": lambda model: model.finish(),
            # Not the reference's: its `fully_shard` would be judged here too.
            "fully_shard": None,
            "MixedPrecisionPolicy": None,
        }

    @torch.no_grad()
    def full_parameters(self):
        """By the plain model's names."""
        found = {}
        for name in self.names:
            owner = self.inner.get_submodule(name.rpartition(".")[0])
            last = name.rpartition(".")[2]
            found[name] = (
                owner.full(owner.shard)[last]
                if isinstance(owner, FlatLayer)
                else getattr(owner, last)
            )
        return {name: value.detach().clone() for name, value in found.items()}


@benign("benign.fsdp-float32-weights")
class Float32Model(FlatModel):
    """Weight and bias in one flat shard, of float32: wider ones are rounded, narrower refused."""

    packs = True

    def __init__(self, module, compute_dtype):
        for name, parameter in module.named_parameters():
            if parameter.element_size() < 4:
                raise ValueError(f"{name}: expected float32, got {parameter.dtype}")
        super().__init__(module.float(), compute_dtype)


SHARD.benign(
    "benign.fsdp-plain", does="The base of the impostors, with nothing overridden: the null one."
)

FSDP.near_miss(
    "fsdp.pads-to-eight",
    ("fsdp.traffic.any-world-size", "fsdp.footprint.any-world-size"),
    "- return -(-whole.shape[0] // self.size())",
    "+ return -(-whole.shape[0] // (8 * self.size())) * 8",
    does="Rounds the rows of a rank up to eight.",
    seen="Alignment for each shard, as for each allocation.",
    unseen="On two ranks, shards are long beside their padding.",
)

FSDP.near_miss(
    "fsdp.talks-to-itself",
    "fsdp.traffic.world-of-one",
    "  if self.size() == 1:",
    "+     dist.all_reduce(own.new_ones(1), group=self.group)",
    "      return own, Done()",
    does="Sends among one rank.",
    seen="A collective that nobody asked whether it is needed.",
    unseen="It is right, and costs a copy or two.",
)

SHARD.near_miss(
    "fsdp.hook-of-its-own",
    "fsdp.lifecycle.collected-in-a-step",
    "  ALIVE.add(self)",
    "+ handle = register_optimizer_step_post_hook(lambda *ignored: None)",
    "+ weakref.finalize(self, handle.remove)",
    does="Removes its optimizer hook when its model is collected.",
    seen="Ours, once: `weakref.finalize(model, handle.remove)`.",
    unseen="The collector hardly ever comes in the middle of a step.",
)

SHARD.near_miss(
    "fsdp.leaves-gradients-on",
    "fsdp.refusals.backward-without-forward",
    "  args, kwargs = super().pre_forward(module, args, kwargs)",
    "+ torch.set_grad_enabled(True)",
    does="Turns recording off for its gather, and then on, also where it was off before.",
    seen="`torch.set_grad_enabled(True)` where the mode of before belongs.",
    unseen="An evaluation gives the same numbers; it only takes more memory.",
)


@near_miss("fsdp.calls-forward", rejected_by="fsdp.forward.runs-the-modules-hooks")
class CallsForward(FlatModel):
    """The whole-model wrapper calls the module's `forward` in place of the module.

    From: `return self.module.forward(*inputs)`, as solutions of CS336 have it.
    Unseen: Models of exercises have no hooks on the outermost module.
    """

    def forward(self, *args, **kwargs):
        return self.inner.forward(*args, **kwargs)


FSDP.near_miss(
    "fsdp.compares-nothing",
    "fsdp.refusals.unequal-ranks",
    does="Takes all ranks to have the same module.",
    seen="FSDP2 of torch 2.13.",
    unseen="Tests build the same model everywhere.",
    outcomes=("failed", "hang", "died"),
)

FSDP.near_miss(
    "fsdp.waits-at-once",
    "fsdp.order.runs-ahead-of-a-straggler",
    does="Waits for each gather and each reduction where it is launched.",
    seen="A collective without async_op.",
    unseen="Ranks of a test are equally fast.",
)

FSDP.near_miss(
    "fsdp.sums-first",
    "fsdp.precision.float16-does-not-overflow",
    does="Adds up in float16 before it divides.",
    seen="One order of sum and division for all dtypes.",
    unseen="Gradients of a test are small.",
)
