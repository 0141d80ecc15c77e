"""Near-misses of gradients: the wrong divisor, the wrong dtype, the wrong tensor."""

from __future__ import annotations

from spec_tests.museum.card import Source

DDP = Source("spec_tests.plain.ddp")

DDP.near_miss(
    "ddp.sum-for-mean",
    ("ddp.gradients.mean", "ddp.training.equals-full-batch"),
    "- flat = torch.cat(parts) / self.size()",
    "+ flat = torch.cat(parts)",
    does="Sums gradients and never divides.",
    seen="The commonest fault of all; Adam is invariant to it.",
    unseen="Adam's curves are the same; only a scale of the gradients tells.",
)

DDP.near_miss(
    "ddp.divides-by-peers",
    ("ddp.gradients.mean", "ddp.gradients.single-rank"),
    "- flat = torch.cat(parts) / self.size()",
    "+ flat = torch.cat(parts) / (self.size() - 1 or 0.5)",
    does="Divides by the number of the other ranks.",
    seen="Off by one in `world_size - 1`, with a special case for one rank.",
    unseen="At two ranks it is a sum, which Adam hides.",
)

DDP.near_miss(
    "ddp.averages-the-hooks-argument",
    ("ddp.gradients.weights-untouched", "ddp.gradients.mean"),
    "- weak = weakref.WeakMethod(self.on_gradient)  # or a dropped model would never be freed",
    "- parameter.register_post_accumulate_grad_hook(lambda p: (weak() or bool)(index))",
    "+ parameter.register_post_accumulate_grad_hook(",
    "+     lambda g: dist.all_reduce(g.detach().div_(self.size()), group=self.group)",
    "+ )",
    "...",
    "- if not self.has_news:",
    "+ if True:  # the hooks have done it all",
    does="Averages the weights and leaves the gradients local.",
    seen="picotron issue 39: a post-accumulate hook is handed the parameter, not the gradient.",
    unseen="The loss curve is plausible, and after each step the weights are averaged again.",
)

DDP.near_miss(
    "ddp.writes-into-copies",
    "ddp.gradients.dtype-and-layout",
    "- parameter.grad.copy_(mean)",
    "+ parameter.grad.reshape(-1).copy_(mean.reshape(-1))",
    does="Writes the mean through `reshape`, which copies an unusual layout.",
    seen="`grad.reshape(-1).copy_(...)`, the habit of every flat buffer.",
    unseen="Contiguous gradients are views, and toys have no others.",
)

DDP.near_miss(
    "ddp.strides-of-its-parameters",
    "ddp.programs.any-production-situation",
    "- self.bucket_bytes = bucket_bytes",
    "+ self.bucket_bytes = 2**30",
    "...",
    "  flat = torch.cat(parts) / self.size()",
    "+ for place, index in zip(self.cut(bucket, flat), bucket, strict=True):",
    "+     place.copy_(self.local(index) / self.size())",
    "...",
    "- return [piece.view(like.shape) for piece, like in zip(pieces, whole, strict=True)]",
    "+ return [",
    "+     flat.as_strided(like.shape, like.stride(), piece.storage_offset())",
    "+     for piece, like in zip(pieces, whole, strict=True)",
    "+ ]",
    does="Cuts its buckets with the strides of the parameters.",
    seen="`flat.as_strided(p.shape, p.stride(), offset)`: a gradient lies as its parameter.",
    unseen="It is right for each layout that fills its memory.",
)

DDP.near_miss(
    "ddp.takes-positions-alone",
    "ddp.gradients.called-by-keyword",
    "- def forward(self, *args: Any, **kwargs: Any) -> Any:",
    "+ def forward(self, *args: Any) -> Any:",
    "...",
    "- return self.module(*args, **kwargs)",
    "+ return self.module(*args)",
    does="Hands on positional arguments alone.",
    seen="`def forward(self, *inputs): return self.module(*inputs)`.",
    unseen="A toy has one input.",
)

DDP.near_miss(
    "ddp.mean-over-forwards",
    ("ddp.gradients.two-forwards-one-backward", "ddp.lifecycle.after-exception"),
    "- self.launched = 0",
    "+ self.launched = self.forwards = 0",
    "...",
    "  def before_training_forward(self) -> None:",
    "+     self.forwards += 1",
    "...",
    "- flat = torch.cat(parts) / self.size()",
    "+ flat = torch.cat(parts) / self.size()",
    "+ flat /= max(self.forwards, 1)",
    does="Divides by the number of forwards since the last step.",
    seen="Averaging over micro-batches is built into the wrapper.",
    unseen="One forward per backward, everywhere.",
)

DDP.near_miss(
    "ddp.clamps-gradients",
    ("ddp.gradients.loss-scale-invariance", "ddp.gradients.mean"),
    "+ flat.clamp_(-50.0, 50.0)",
    "  handle = dist.all_reduce(flat, group=self.group, async_op=True)",
    does="Clamps every gradient.",
    seen="A safety belt against overflow in a low-precision reduction.",
    unseen="Gradients of toys are small.",
)

DDP.near_miss(
    "ddp.averages-what-the-hook-gets",
    "ddp.programs.any-situation",
    "- weak = weakref.WeakMethod(self.on_gradient)  # or a dropped model would never be freed",
    "- parameter.register_post_accumulate_grad_hook(lambda p: (weak() or bool)(index))",
    "+ parameter.register_hook(lambda g: dist.all_reduce(g.div_(self.size()), group=self.group))",
    "...",
    "- if not self.has_news:",
    "+ if True:  # the hooks have done it all",
    does="Averages the gradient in place in a hook on the tensor, before it is accumulated.",
    seen="`p.register_hook(all_reduce)`, in a solution of CS336; torch says that hooks must not.",
    unseen="Only a sum passes one tensor on to two, and batches broadcast the bias of a layer.",
)
