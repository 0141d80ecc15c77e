"""Near-misses of construction and of process groups: who starts from whom, who is asked."""

from spec_tests.museum.card import Source

DDP = Source("spec_tests.plain.ddp")
REFERENCE = Source("solution.parallel.ddp")

DDP.near_miss(
    "ddp.no-broadcast",
    ("ddp.construction.parameters-from-first-rank", "ddp.construction.buffers-from-first-rank"),
    "- self.take_first(module.parameters())",
    "- self.take_first(module.buffers())",
    does="Broadcasts nothing at construction.",
    seen="picotron's naive and bucketed wrappers rely on equal seeds.",
    unseen="Tests seed all ranks alike, so there is nothing to broadcast.",
)

DDP.near_miss(
    "ddp.broadcasts-trainable-only",
    "ddp.construction.parameters-from-first-rank",
    "- self.take_first(module.parameters())",
    "+ self.take_first(p for p in module.parameters() if p.requires_grad)",
    does="Broadcasts trainable parameters and forgets frozen ones.",
    seen="The loop over `requires_grad` parameters is reused for the broadcast.",
    unseen="Few toy models have a frozen layer, and fewer tests look at it.",
)

DDP.near_miss(
    "ddp.broadcasts-copies",
    "ddp.programs.any-situation",
    "- tensor.copy_(whole)",
    does="Broadcasts `p.contiguous()` and forgets that it may be a copy.",
    seen="gloo refuses non-contiguous tensors; `contiguous()` is added, the copy back is not.",
    unseen="Where parameters are contiguous it is the tensor itself.",
)

DDP.near_miss(
    "ddp.sends-what-lies-between",
    "ddp.construction.parts-of-larger-tensors",
    "- whole = tensor.detach().contiguous()",
    "+ whole = tensor.detach()",
    does="Broadcasts each parameter itself, whatever its strides.",
    seen="`dist.broadcast(p.data, 0)` in nearly every tutorial; gloo takes it for contiguous.",
    unseen="A transposed one fills its memory, and is right.",
)

DDP.near_miss(
    "ddp.no-buffers-at-start",
    "ddp.construction.buffers-from-first-rank",
    "- self.take_first(module.buffers())",
    does="Broadcasts parameters and forgets buffers.",
    seen="`parameters()` does not list buffers.",
    unseen="Models of exercises have no buffers.",
)

DDP.near_miss(
    "ddp.thaws-frozen",
    ("ddp.construction.keeps-requires-grad", "ddp.gradients.frozen-stay-none"),
    "- self.trainable = [p for p in module.parameters() if p.requires_grad]",
    "+ self.trainable = list(module.requires_grad_().parameters())",
    does="Switches gradients on for every parameter.",
    seen="A wrapper that calls `requires_grad_()` so that its hooks can be registered.",
    unseen="The loss falls faster.",
)

DDP.near_miss(
    "ddp.rounds-output",
    "ddp.construction.forward-is-unchanged",
    "- return self.module(*args, **kwargs)",
    "+ output = self.module(*args, **kwargs)",
    "+ return output.bfloat16().to(output.dtype)",
    does="Casts the output down and up again.",
    seen="Mixed-precision wrappers that cast outputs whatever the policy says.",
    unseen="`allclose` with default tolerances, on outputs near one.",
)

DDP.near_miss(
    "ddp.sets-precision",
    "ddp.lifecycle.leaves-no-trace",
    "  self.take_first(module.buffers())",
    '+ torch.set_float32_matmul_precision("high")',
    does="Sets the precision of matrix products for the whole process.",
    seen='`torch.set_float32_matmul_precision("high")` in a recipe, moved into the wrapper.',
    unseen="Gradients are right; measurements before and after cannot be compared.",
)

DDP.near_miss(
    "ddp.calls-forward",
    "ddp.construction.runs-the-modules-hooks",
    "- return self.module(*args, **kwargs)",
    "+ return self.module.forward(*args, **kwargs)",
    does="Calls the module's `forward` in place of the module.",
    seen="`return self.module.forward(*inputs)`, as solutions of CS336 have it.",
    unseen="Models of exercises have no hooks on the outermost module.",
)

DDP.near_miss(
    "ddp.divides-by-world",
    "ddp.group.divides-by-its-size",
    "- flat = torch.cat(parts) / self.size()",
    "+ flat = torch.cat(parts) / dist.get_world_size()",
    does="Divides by the size of the world in place of the group.",
    seen="`dist.get_world_size()` without an argument; verl issue 7493 is its sibling.",
    unseen="Tests have one group.",
)

DDP.near_miss(
    "ddp.first-rank-of-world",
    "ddp.group.starts-from-its-first-rank",
    "- dist.broadcast(whole, group=self.group, group_src=0)",
    "+ dist.broadcast(whole, src=0)",
    does="Broadcasts over the world in place of the group.",
    seen="`src=0` and no group in the constructor.",
    unseen="Tests have one group.",
)

DDP.near_miss(
    "ddp.reduces-in-training-mode",
    "ddp.programs.any-situation",
    "- if not (self.is_synchronised and self.is_armed):",
    "+ if not (self.is_synchronised and self.is_armed and self.training):",
    "...",
    "- if not self.has_news:",
    "+ if not (self.has_news and self.training):",
    does="Reduces nothing while the module is in evaluation mode.",
    seen='`self.training` read as "gradients are wanted".',
    unseen="Loops call `train()`. Fine-tuning without dropout does not, and ranks drift apart.",
)

DDP.near_miss(
    "ddp.keeps-every-model",
    "ddp.footprint.models-made-and-dropped",
    "- parameter.register_post_accumulate_grad_hook(lambda p: (weak() or bool)(index))",
    "+ parameter.register_post_accumulate_grad_hook(lambda p: self.on_gradient(index))",
    does="Registers hooks that hold the wrapper, and with it the module and its parameters.",
    seen="`register_post_accumulate_grad_hook(self.reduce)`, in most solutions of CS336.",
    unseen="A program makes one model; the cycle goes through C++, where no collector looks.",
)

REFERENCE.near_miss(
    "ddp.leaves-additions-alone",
    "ddp.lifecycle.parameters-added-later",
    "- self._inventory.require_nothing_new(type(self.module).__name__)",
    does="Trains parameters that are added after wrapping on each rank by itself.",
    seen="ours, once, and DistributedDataParallel.",
    unseen="They are added to all ranks alike, and the loss falls.",
)
