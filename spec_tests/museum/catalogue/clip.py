"""Near-misses of clipping by the global norm, and right but unusual ways to do it."""

from spec_tests.museum.card import Source

CLIP = Source("spec_tests.plain.clip")

CLIP.near_miss(
    "clip.local-norm",
    ("clip.norm.global", "clip.scaling.factor"),
    "- parts += self.gathered(self.part(divided), alike)",
    "+ parts += [self.part(divided)]",
    does="Takes the norm of the shards that the rank holds.",
    seen="torchtitan issue 19: clip_grad_norm_ on local shards.",
    unseen="One rank's losses look as usual; each part of a tensor is scaled by another factor.",
)

CLIP.near_miss(
    "clip.counts-copies",
    ("clip.norm.replicated-once", "clip.norm.mixed", "clip.traffic.replicated-sends-nothing"),
    "  def is_divided(self, gradient: torch.Tensor) -> bool:",
    "+     return True",
    "...",
    "- return gradient.device_mesh.get_group(gradient.device_mesh.ndim - 1)",
    "+ return None",
    does="Sums over ranks also the gradients that all ranks hold whole.",
    seen="VeOmni issue 184, pytorch issue 88955.",
    unseen="Too large a norm clips more, and training is only slower.",
)

CLIP.near_miss(
    "clip.whole-mesh",
    "clip.norm.replicated-axes-once",
    "- return gradient.device_mesh.get_group(gradient.device_mesh.ndim - 1)",
    "+ return None",
    does="Sums over all ranks of a mesh, replicas too.",
    seen="hyper-parallel issue 526: hybrid sharding.",
    unseen="Tests have one axis.",
)

CLIP.near_miss(
    "clip.adds-maxima",
    "clip.norm.orders",
    "- return together.max() if self.order == math.inf else together.sum()",
    "+ return together.sum()",
    does="Adds up the ranks' largest elements.",
    seen="torchrec issue 3199: one reduction for all orders.",
    unseen="Everyone clips by the 2-norm.",
)

CLIP.near_miss(
    "clip.adds-norms",
    ("clip.norm.global", "clip.norm.orders"),
    "- return parts",
    "+ norms = [self.root(part) for part in parts]",
    "+ return [torch.stack(norms).sum().pow(self.order)] if math.isfinite(self.order) else norms",
    does="Adds up the ranks' norms.",
    seen="An all-reduce of the norms that `get_total_norm` returned for the shards.",
    unseen="For p = 1 it is right; and a norm that is too large clips a little more.",
)

CLIP.near_miss(
    "clip.largest-of-nothing",
    "clip.norm.empty-shards",
    '  """Sum of |x|^p, or the largest |x|, of what this rank holds."""',
    "+ if gradients:",
    "+     torch.cat([self.local(g).reshape(-1) for g in gradients]).abs().max()",
    does="Asks an empty shard for its largest element.",
    seen="torchrec issues 3809 and 3891; FSDP2 for p = infinity.",
    unseen="Models have more rows than tests have ranks.",
    outcomes=("failed", "hang"),
)

CLIP.near_miss(
    "clip.fills-none",
    "clip.norm.absent-gradients",
    "+ for tensor in self.tensors:",
    "+     if tensor.grad is None:",
    "+         tensor.grad = torch.zeros_like(tensor)",
    "  self.gradients = [p.grad for p in self.tensors if p.grad is not None]",
    does="Puts zeros where a gradient is None.",
    seen="A foreach over all parameters wants tensors.",
    unseen="The norm is the same; the optimizer decays parameters that it should skip.",
)

CLIP.near_miss(
    "clip.own-part-first",
    "clip.norm.plain-and-equal",
    "- return flat.max() if self.order == math.inf else flat.pow(self.order).sum()",
    "+ part = flat.max() if self.order == math.inf else flat.pow(self.order).sum()",
    "+ return part.float()",
    "...",
    "- return parts",
    "+ return parts[dist.get_rank() :] + parts[: dist.get_rank()]",
    "...",
    "- together = torch.stack(parts)",
    "- return together.max() if self.order == math.inf else together.sum()",
    "+ return sum(parts)",
    does="Adds its own part first, then the others'.",
    seen="A loop over peers.",
    unseen="Equal to all digits but the last.",
)

CLIP.near_miss(
    "clip.reads-twice",
    "clip.norm.any-iterable",
    "- self.tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)",
    "+ self.tensors = [parameters] if isinstance(parameters, torch.Tensor) else parameters",
    "+ self.first = [p.grad for p in self.tensors if p.grad is not None]",
    does="Walks the parameters twice.",
    seen="`for p in parameters` in two loops.",
    unseen="Tests pass a list.",
)

CLIP.near_miss(
    "clip.gathers-gradients",
    "clip.traffic.one-number",
    "  def norm(self) -> torch.Tensor:",
    "+     whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in self.gradients]",
    "+     return self.root(self.part(whole))",
    does="Gathers whole gradients to take their norm.",
    seen="`grad.full_tensor()`.",
    unseen="The number is right, once there is memory for it.",
)

CLIP.near_miss(
    "clip.adds-up-in-float32",
    "clip.norm.of-many-elements",
    '  """Sum of |x|^p, or the largest |x|, of what this rank holds."""',
    "+ if self.order == 2.0 and gradients:",
    "+     norms = [torch.linalg.vector_norm(self.local(g)) for g in gradients]",
    "+     return torch.stack(norms).double().square().sum()",
    does="Takes the norm of each whole tensor in float32.",
    seen="torch.nn.utils.clip_grad_norm_ on a CPU.",
    unseen="Tests have small tensors; a plain run and a data-parallel one are off by the same.",
)

CLIP.near_miss(
    "clip.scales-by-own-norm",
    "clip.scaling.factor",
    "+ norm = self.root(self.part(self.gradients))",
    "  for gradient in self.gradients:",
    does="Returns the global norm and scales by the rank's own.",
    seen="miles_diffusion issue 35: a local partial value is used as if it were global.",
    unseen="The norm in the log is right.",
)

CLIP.near_miss(
    "clip.normalises",
    "clip.scaling.untouched-below",
    "- return (self.max_norm / (norm + 1e-6)).clamp(max=1.0)",
    "+ return self.max_norm / (norm + 1e-6)",
    does="Scales small gradients up to max_norm.",
    seen="The clamp at one is forgotten.",
    unseen="Early in training norms are large.",
)

CLIP.near_miss(
    "clip.skips-nan",
    ("clip.nonfinite.agreed", "clip.nonfinite.error-on-all-ranks"),
    "- together = torch.stack(parts)",
    "+ together = torch.stack(parts).nan_to_num(nan=0.0, posinf=math.inf)",
    does="Leaves NaN out of the norm.",
    seen="nan_to_num, to keep the log readable.",
    unseen="Norms are finite.",
)

CLIP.near_miss(
    "clip.skips-nan-in-maxima",
    "clip.nonfinite.largest-of-nan",
    "  together = torch.stack(parts)",
    "+ if self.order == math.inf:",
    "+     together = together.nan_to_num(nan=0.0, posinf=math.inf)",
    does="Combines the largest elements by comparison.",
    seen="An all-reduce with MAX: PyTorch's own, for DTensors.",
    unseen="The 2-norm is right.",
)

CLIP.near_miss(
    "clip.scales-then-raises",
    "clip.nonfinite.error-scales-nothing",
    "- self.check(norm)",
    "- self.scale(norm)",
    "+ self.scale(norm)",
    "+ self.check(norm)",
    does="Scales by NaN, then raises.",
    seen="The check is at the end.",
    unseen="It raises.",
)

CLIP.near_miss(
    "clip.raises-when-asked",
    "clip.nonfinite.finite-is-no-error",
    "- if self.strict and not math.isfinite(norm):",
    "+ if self.strict:",
    does="Raises whenever error_if_nonfinite is set.",
    seen="The condition has lost its `not`, or its second half.",
    unseen="Tests of the flag use NaN.",
)

CLIP.benign(
    "benign.clip-asks-everyone",
    "- return self.root(self.combined(parts))",
    "+ norm = self.root(self.combined(parts))",
    "+ if not any(map(self.is_divided, self.gradients)):",
    "+     dist.all_reduce(norm, op=dist.ReduceOp.MAX)",
    "+ return norm",
    does="Agrees on the norm of replicated gradients too.",
)

CLIP.benign(
    "benign.clip-refuses-mixtures",
    "  def norm(self) -> torch.Tensor:",
    "+     if len({isinstance(gradient, DTensor) for gradient in self.gradients}) > 1:",
    '+         raise ValueError("expected parameters to be all plain or all DTensors, got both")',
    does="Refuses plain tensors beside DTensors.",
)

CLIP.benign(
    "benign.clip-plain", does="The base of the near-misses: gathers parts, adds in rank order."
)

CLIP.benign(
    "benign.clip-gathers-gradients",
    "  def norm(self) -> torch.Tensor:",
    "+     whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in self.gradients]",
    "+     return self.root(self.part(whole))",
    does="Takes the norm of gathered gradients.",
)

CLIP.near_miss(
    "clip.asks-gradients-alone",
    "clip.norm.absent-on-one-rank",
    "- if self.is_divided(tensor if tensor.grad is None else tensor.grad):",
    "+ if tensor.grad is not None and self.is_divided(tensor.grad):",
    does="Takes no part in the sum where the rank has no sharded gradient.",
    seen="A list of gradients that are not None, PyTorch's own among them.",
    unseen="Ranks that run the same layers have gradients of the same parameters.",
    outcomes=("hang",),
)
