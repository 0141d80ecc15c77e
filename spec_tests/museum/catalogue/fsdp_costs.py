"""Near-misses of sharded data parallelism that compute right: memory, and precision."""

from __future__ import annotations

from spec_tests.museum.card import Source

FSDP = Source("spec_tests.plain.fsdp")
SHARD = Source("spec_tests.plain.fully_shard")
SCHEDULE = Source("solution.parallel.fsdp.schedule")

# ----------------------------------------------------------------------------------------- memory


FSDP.near_miss(
    "fsdp.keeps-originals",
    "fsdp.footprint.shards-alone-stay",
    "  local = self.cut(parameter.detach()).clone()",
    '+ self.originals = [*getattr(self, "originals", []), parameter]',
    does="Keeps the full parameters of before beside their shards.",
    seen="A list of the original parameters, for their shapes and names.",
    unseen="The numbers are right.",
)

SHARD.near_miss(
    "fsdp.leaves-embeddings",
    "fsdp.footprint.embedding-of-a-whole-model",
    "- layers = [part for part in module.modules() if isinstance(part, nn.Linear | nn.Embedding)]",
    "+ layers = [part for part in module.modules() if isinstance(part, nn.Linear)]",
    does="Replicates the embedding of a whole model.",
    seen="A solution of CS336 that gathers Linear layers only.",
    unseen="Its numbers are right, and so is the memory of a tower of Linear layers.",
)

SHARD.near_miss(
    "fsdp.looks-at-children",
    "fsdp.footprint.layer-as-the-whole-model",
    "- return [layer for layer in layers if layer not in inside]",
    "+ return [layer for layer in layers if layer not in inside and layer is not module]",
    does="Replicates a whole model that is a layer itself.",
    seen="`for name, child in module.named_children()` in two solutions of CS336.",
    unseen="Models are more than one layer, nearly always.",
)

SCHEDULE.near_miss(
    "fsdp.keeps-in-evaluation",
    "fsdp.footprint.freed-after-use",
    "- if not (self._keeps(unit) and (has_backward or unit.was_kept)):",
    "+ if has_backward and not self._keeps(unit):",
    does="Frees after a forward that a backward follows, and not after another.",
    seen="Freeing hangs on what autograd has saved, and without gradients it has saved nothing.",
    unseen="Memory is measured in training, and the next step frees it.",
)

FSDP.near_miss(
    "fsdp.ignores-keeping",
    "fsdp.footprint.kept-on-request",
    "- return not self.is_root if wanted is None else wanted is True or wanted > 1",
    "+ return True",
    does="Reshards after every forward, also with `reshard_after_forward=False`.",
    seen="An argument that is stored and never read.",
    unseen="The numbers are right.",
)

FSDP.near_miss(
    "fsdp.one-is-true",
    "fsdp.traffic.ints-for-true-and-false",
    "- return not self.is_root if wanted is None else wanted is True or wanted > 1",
    "+ return not self.is_root if wanted is None else bool(wanted)",
    does="Frees full weights after forward where `reshard_after_forward` is 1.",
    seen="`if reshard_after_forward:`, where True and 1 are the same.",
    unseen="The numbers are right; a job of one rank per node sends one copy too many.",
)

FSDP.near_miss(
    "fsdp.frees-at-the-end",
    "fsdp.footprint.peak-does-not-grow-with-depth",
    "- return not self.is_root if wanted is None else wanted is True or wanted > 1",
    "+ if self.is_root and self.run is not None:",
    "+     for unit in self.run.units:",
    "+         unit.reshard()",
    "+ return self.is_root",
    "...",
    "  def post_backward(self) -> None:",
    "+     return",
    does="Frees all units at the end of a pass.",
    seen="Freeing in one callback is simpler than in many hooks.",
    unseen="Before and after a pass, memory is as it should be.",
)

FSDP.near_miss(
    "fsdp.keeps-handles",
    "fsdp.footprint.no-growth",
    "  whole = own.new_empty(self.size() * own.numel())",
    '+ self.sent = [*getattr(self, "sent", []), own]',
    does="Notes every buffer that it ever sent.",
    seen="A list of handles that is never cleared.",
    unseen="Ten steps fit into any memory.",
)

SHARD.near_miss(
    "fsdp.remembers-every-model",
    "fsdp.footprint.models-made-and-dropped",
    "- ALIVE: weakref.WeakSet[PlainFsdp] = weakref.WeakSet()",
    "+ ALIVE: set[PlainFsdp] = set()",
    does="Keeps every unit that it ever made in a list of the class.",
    seen="A registry by which hooks find their unit, without weak references.",
    unseen="A script trains one model.",
)


# -------------------------------------------------------------------------------------- precision


FSDP.near_miss(
    "fsdp.ignores-dtype",
    "fsdp.precision.computes-in-its-dtype",
    "- return self.policy.param_dtype or piece.parameter.dtype",
    "+ return piece.parameter.dtype",
    "@ spec_tests.plain.fully_shard",
    "- args, kwargs = self.cast((args, kwargs), self.policy.param_dtype)",
    "+ pass",
    "...",
    "- output = self.cast(output, self.policy.output_dtype)",
    "+ pass",
    does="Computes in the parameters' own dtype.",
    seen="An argument that is stored and never read; CS336's float16 tests accept it.",
    unseen="It is more precise than asked for.",
)

FSDP.near_miss(
    "fsdp.half-masters",
    ("fsdp.precision.updates-are-not-lost", "fsdp.precision.shards-keep-their-dtype"),
    "  local = self.cut(parameter.detach()).clone()",
    "+ local = local.to(self.policy.param_dtype or local.dtype)",
    does="Keeps its shards in bfloat16.",
    seen="`module.to(compute_dtype)` before sharding.",
    unseen="Updates are lost later, when they have become small.",
)

FSDP.near_miss(
    "fsdp.casts-buffers",
    "fsdp.precision.shards-keep-their-dtype",
    "  module.register_forward_hook(after, always_call=True)",
    "+ for part in module.modules():",
    "+     for name, buffer in part.named_buffers(recurse=False):",
    "+         if buffer.is_floating_point():",
    "+             part._buffers[name] = buffer.to(policy.param_dtype or buffer.dtype)",
    does="Casts buffers along with weights.",
    seen="pytorch issue 146114.",
    unseen="Running statistics lose their last digits slowly.",
)

FSDP.near_miss(
    "fsdp.reduces-in-half",
    "fsdp.precision.reduces-in-its-dtype",
    "- own = flat.new_empty(flat.numel() // self.size())",
    "+ flat = flat.to(self.policy.param_dtype or flat.dtype)",
    "+ own = flat.new_empty(flat.numel() // self.size())",
    does="Reduces in bfloat16 whatever reduce_dtype says.",
    seen="The buffer takes the gradients' dtype.",
    unseen="Two ranks hardly round.",
)

FSDP.near_miss(
    "fsdp.accumulates-in-half",
    "fsdp.precision.accumulates-in-its-dtype",
    "- gradient = gradient.to(self.policy.reduce_dtype or gradient.dtype)",
    "- piece.pending = gradient if piece.pending is None else piece.pending + gradient",
    "+ if piece.pending is not None:",
    "+     gradient = piece.pending.to(gradient.dtype) + gradient",
    "+ piece.pending = gradient.to(self.policy.reduce_dtype or gradient.dtype)",
    does="Adds up micro-batches in bfloat16 and reduces in float32.",
    seen="DeepSpeed issues 2352 and 2768.",
    unseen="With one micro-batch per step nothing is added up.",
)

FSDP.near_miss(
    "fsdp.keeps-the-first-share",
    "fsdp.precision.layer-used-twice",
    "- owner._parameters[name] = piece.parameter if sharded else piece.full",
    "+ was_used = self.run is not None and self in self.run.order and not self.in_backward",
    "+ is_cast = self.compute_dtype(piece) != piece.parameter.dtype",
    "+ full = piece.full.detach() if was_used and is_cast and not sharded else piece.full",
    "+ owner._parameters[name] = piece.parameter if sharded else full",
    does="Loses one of two gradients of a layer that is called twice in half precision.",
    seen="Each call makes a cast copy of its own, and one of them has the hook.",
    unseen="In float32, and where layers are called once, it is right.",
)

FSDP.near_miss(
    "fsdp.gathers-wide",
    ("fsdp.precision.sends-in-its-dtype", "fsdp.precision.gathers-in-its-dtype"),
    "- own = own.to(self.compute_dtype(pieces[0]))",
    does="Gathers in float32 and casts afterwards.",
    seen="The cast is where the weights are used.",
    unseen="The numbers are right; twice the bytes are sent.",
)

FSDP.near_miss(
    "fsdp.zeros-while-waiting",
    "fsdp.footprint.window-costs-one-copy",
    does="Keeps zeros in `.grad` while the full gradients wait for their reduction.",
    seen="Ours, once: the placeholder of a pending gradient was as large as the shard's own.",
    unseen="It is freed with the reduction; between steps nothing is left of it.",
)
