"""Near-misses of clipping by the global norm, and right but unusual ways to do it."""

from spec_tests.museum.card import Source

CLIP = Source("spec_tests.plain.clip")
GATHERS = (
    "  parts = [part(copies, order)]",
    "+ held = [tensor.grad for tensor in tensors if tensor.grad is not None]",
    "+ whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in held]",
    "+ parts, tensors = [part(whole, order)], []",
)

CLIP.near_miss(
    "clip.local-norm",
    ("clip.norm.global", "clip.scaling.factor"),
    "- dist.all_gather(everyones, own, group=group)",
    "- parts += everyones",
    "+ parts.append(own)",
    does="Takes the norm of the shards that the rank holds.",
    seen="torchtitan issue 19: clip_grad_norm_ on local shards.",
    unseen="One rank's losses look as usual; each part of a tensor is scaled by another factor.",
)

CLIP.near_miss(
    "clip.counts-copies",
    ("clip.norm.replicated-once", "clip.norm.mixed", "clip.traffic.replicated-sends-nothing"),
    "- group = tensor.device_mesh.get_group(tensor.device_mesh.ndim - 1)",
    "+ group = None",
    "...",
    '  """True if other ranks hold other elements of the tensor."""',
    "+ return True",
    does="Sums over ranks also the gradients that all ranks hold whole.",
    seen="VeOmni issue 184, pytorch issue 88955.",
    unseen="Too large a norm clips more, and training is only slower.",
)

CLIP.near_miss(
    "clip.whole-mesh",
    "clip.norm.replicated-axes-once",
    "- group = tensor.device_mesh.get_group(tensor.device_mesh.ndim - 1)",
    "+ group = None",
    does="Sums over all ranks of a mesh, replicas too.",
    seen="hyper-parallel issue 526: hybrid sharding.",
    unseen="Tests have one axis.",
)

CLIP.near_miss(
    "clip.adds-maxima",
    "clip.norm.orders",
    "- return together.max() if order == math.inf else together.sum().pow(1.0 / order)",
    "+ return together.sum() if order == math.inf else together.sum().pow(1.0 / order)",
    does="Adds up the ranks' largest elements.",
    seen="torchrec issue 3199: one reduction for all orders.",
    unseen="Everyone clips by the 2-norm.",
)

CLIP.near_miss(
    "clip.adds-norms",
    ("clip.norm.global", "clip.norm.orders"),
    "  dist.all_gather(everyones, own, group=group)",
    "+ if order != math.inf:",
    "+     everyones = [sum(each.pow(1.0 / order) for each in everyones).pow(order)]",
    does="Adds up the ranks' norms.",
    seen="An all-reduce of the norms that `get_total_norm` returned for the shards.",
    unseen="For p = 1 it is right; and a norm that is too large clips a little more.",
)

CLIP.near_miss(
    "clip.largest-of-nothing",
    "clip.norm.empty-shards",
    "  sizes = [local(gradient).reshape(-1).abs() for gradient in gradients]",
    "+ if sizes:",
    "+     torch.cat(sizes).max()",
    does="Asks an empty shard for its largest element.",
    seen="torchrec issues 3809 and 3891; FSDP2 for p = infinity.",
    unseen="Models have more rows than tests have ranks.",
    outcomes=("failed", "hang"),
)

CLIP.near_miss(
    "clip.fills-none",
    "clip.norm.absent-gradients",
    "+ for tensor in tensors:",
    "+     if tensor.grad is None:",
    "+         tensor.grad = torch.zeros_like(tensor)",
    "  gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]",
    does="Puts zeros where a gradient is None.",
    seen="A foreach over all parameters wants tensors.",
    unseen="The norm is the same; the optimizer decays parameters that it should skip.",
)

CLIP.near_miss(
    "clip.own-part-first",
    "clip.norm.plain-and-equal",
    "- parts += everyones",
    "+ parts += everyones[dist.get_rank() :] + everyones[: dist.get_rank()]",
    "...",
    "- together = torch.stack(parts)",
    "+ together = sum(parts)",
    "...",
    "- return flat.max() if order == math.inf else flat.pow(order).sum()",
    "+ return (flat.max() if order == math.inf else flat.pow(order).sum()).float()",
    does="Adds its own part first, then the others'.",
    seen="A loop over peers.",
    unseen="Equal to all digits but the last.",
)

CLIP.near_miss(
    "clip.reads-twice",
    "clip.norm.any-iterable",
    "- tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)",
    "+ tensors = [parameters] if isinstance(parameters, torch.Tensor) else parameters",
    does="Walks the parameters twice.",
    seen="`for p in parameters` in two loops.",
    unseen="Tests pass a list.",
)

CLIP.near_miss(
    "clip.gathers-gradients",
    "clip.traffic.one-number",
    *GATHERS,
    does="Gathers whole gradients to take their norm.",
    seen="`grad.full_tensor()`.",
    unseen="The number is right, once there is memory for it.",
)

CLIP.near_miss(
    "clip.adds-up-in-float32",
    "clip.norm.of-many-elements",
    "+ if order == 2.0 and gradients:",
    "+     norms = [torch.linalg.vector_norm(local(g)) for g in gradients]",
    "+     return torch.stack(norms).double().square().sum()",
    "  sizes = [local(gradient).reshape(-1).abs() for gradient in gradients]",
    does="Takes the norm of each whole tensor in float32.",
    seen="torch.nn.utils.clip_grad_norm_ on a CPU.",
    unseen="Tests have small tensors; a plain run and a data-parallel one are off by the same.",
)

CLIP.near_miss(
    "clip.scales-by-own-norm",
    "clip.scaling.factor",
    "- factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)",
    "+ held = torch.cat([torch.zeros(1), *(local(g).reshape(-1) for g in gradients)])",
    "+ own = torch.linalg.vector_norm(held, norm_type)",
    "+ factor = (max_norm / (own + 1e-6)).clamp(max=1.0)",
    does="Returns the global norm and scales by the rank's own.",
    seen="miles_diffusion issue 35: a local partial value is used as if it were global.",
    unseen="The norm in the log is right.",
)

CLIP.near_miss(
    "clip.normalises",
    "clip.scaling.untouched-below",
    "- factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)",
    "+ factor = max_norm / (norm + 1e-6)",
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
    "+ if order == math.inf:",
    "+     together = together.nan_to_num(nan=0.0, posinf=math.inf)",
    does="Combines the largest elements by comparison.",
    seen="An all-reduce with MAX: PyTorch's own, for DTensors.",
    unseen="The 2-norm is right.",
)

CLIP.near_miss(
    "clip.scales-then-raises",
    "clip.nonfinite.error-scales-nothing",
    "- if error_if_nonfinite and not math.isfinite(norm):",
    '-     raise RuntimeError(f"the gradient norm is {norm.item()}; nothing was scaled")',
    "...",
    "+ if error_if_nonfinite and not math.isfinite(norm):",
    '+     raise RuntimeError(f"the gradient norm is {norm.item()}; nothing was scaled")',
    "  return norm",
    does="Scales by NaN, then raises.",
    seen="The check is at the end.",
    unseen="It raises.",
)

CLIP.near_miss(
    "clip.raises-when-asked",
    "clip.nonfinite.finite-is-no-error",
    "- if error_if_nonfinite and not math.isfinite(norm):",
    "+ if error_if_nonfinite:",
    does="Raises whenever error_if_nonfinite is set.",
    seen="The condition has lost its `not`, or its second half.",
    unseen="Tests of the flag use NaN.",
)

CLIP.benign(
    "benign.clip-asks-everyone",
    "  norm = global_norm(tensors, float(norm_type))",
    "+ if not any(map(is_divided, gradients)):",
    "+     dist.all_reduce(norm, op=dist.ReduceOp.MAX)",
    does="Agrees on the norm of replicated gradients too.",
)

CLIP.benign(
    "benign.clip-refuses-mixtures",
    "+ if len({isinstance(gradient, DTensor) for gradient in gradients}) > 1:",
    '+     raise ValueError("expected parameters to be all plain or all DTensors, got both")',
    "  norm = global_norm(tensors, float(norm_type))",
    does="Refuses plain tensors beside DTensors.",
)

CLIP.benign(
    "benign.clip-plain", does="The base of the near-misses: gathers parts, adds in rank order."
)

CLIP.benign(
    "benign.clip-gathers-gradients",
    *GATHERS,
    does="Takes the norm of gathered gradients.",
)

CLIP.near_miss(
    "clip.asks-gradients-alone",
    "clip.norm.absent-on-one-rank",
    "- if is_divided(tensor if tensor.grad is None else tensor.grad):",
    "+ if tensor.grad is not None and is_divided(tensor.grad):",
    does="Takes no part in the sum where the rank has no sharded gradient.",
    seen="A list of gradients that are not None, PyTorch's own among them.",
    unseen="Ranks that run the same layers have gradients of the same parameters.",
    outcomes=("hang",),
)
