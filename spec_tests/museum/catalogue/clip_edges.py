"""Near-misses of clipping in what few runs meet: one changed line of the reference's."""

from spec_tests.museum.card import Source

REFERENCE = Source("solution.parallel.clip")

REFERENCE.near_miss(
    "clip.sums-over-one-axis",
    "clip.norm.two-divided-axes",
    "      if not placement.is_replicate() and mesh.size(axis) > 1",
    "- )",
    "+ )[:1]",
    does="Sums over the first axis of the mesh that divides the tensor.",
    seen="A mesh with one such axis, for which it was written.",
    unseen="FSDP alone, or tensor parallelism alone.",
)

REFERENCE.near_miss(
    "clip.over-the-first-mesh",
    "clip.norm.two-meshes",
    "- own = divided.setdefault(_divided_over(tensor), [])",
    "+ over = _divided_over(tensor)",
    "+ own = divided.setdefault(next(filter(None, divided), over) if over else over, [])",
    does="Sums over the first sharded tensor's mesh, also for tensors on other meshes.",
    seen="NVIDIA-NeMo/Automodel issue 3816, Megatron-LM issue 5916.",
    unseen="A model without experts lies on one mesh.",
)

REFERENCE.near_miss(
    "clip.asks-finiteness-of-twos",
    "clip.nonfinite.error-on-all-ranks",
    "- if error_if_nonfinite and not math.isfinite(norm):",
    "+ if error_if_nonfinite and norm_type != math.inf and not math.isfinite(norm):",
    does="Raises for a non-finite norm only where squares are summed.",
    seen="a sum that is not finite tells all; a maximum was added later.",
    unseen="Nearly all clip by the 2-norm.",
)

REFERENCE.near_miss(
    "clip.takes-the-list-as-it-is",
    "clip.norm.tied-once",
    "- return list(dict.fromkeys(found))",
    "+ return found",
    does="Counts and scales a tensor as often as it is listed.",
    seen="PyTorch's own.",
    unseen="`parameters()` gives a tied weight once.",
)

REFERENCE.near_miss(
    "clip.norms-in-their-dtype",
    "clip.norm.dtypes",
    "- norms.extend(torch._foreach_norm(alike, order, dtype=wide))",
    "+ norms.extend(torch._foreach_norm(alike, order, dtype=dtype))",
    does="Rounds the norm of each gradient to the gradient's dtype.",
    seen="`torch._foreach_norm` without a dtype, PyTorch's own among others.",
    unseen="Gradients of float32.",
)

REFERENCE.near_miss(
    "clip.takes-summands-for-shards",
    "clip.norm.unreduced",
    "- if any(placement.is_partial() for placement in layout.placements):",
    "+ if not layout.placements:",
    does="Takes gradients that are not reduced yet for divided ones.",
    seen="`not placement.is_replicate()`, and nothing else.",
    unseen="Wrappers reduce before anybody clips.",
)

REFERENCE.near_miss(
    "clip.makes-new-gradients",
    "clip.scaling.in-place",
    "  for tensor in _listed(parameters):",
    "      if tensor.grad is not None:",
    "+         tensor.grad = tensor.grad.clone()",
    does="Puts scaled copies into `.grad`.",
    seen="`p.grad = p.grad * factor`.",
    unseen="Values are right; views into a reducer's buckets are none any more.",
)

REFERENCE.near_miss(
    "clip.divides-by-the-norm",
    "clip.scaling.zeros",
    "- factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)",
    "+ factor = (max_norm / norm).clamp(max=1.0)",
    does="Divides by the norm itself.",
    seen="The formula of the paper, without the guard against division by zero.",
    unseen="No norm is zero, and the last bits are nobody's concern.",
)

REFERENCE.near_miss(
    "clip.scales-the-last-run",
    "clip.scaling.dtypes-in-turn",
    "- gradients.setdefault((local.device, local.dtype), []).append(local)",
    "+ kind = (local.device, local.dtype)",
    "+ is_new = not gradients or next(reversed(gradients)) != kind",
    "+ before = [] if is_new else gradients[kind]",
    "+ gradients.pop(kind, None)",
    "+ gradients[kind] = [*before, local]",
    does="Groups gradients by dtype, and keeps of each dtype those that came in a row last.",
    seen="`dict(itertools.groupby(...))` of what is not sorted",
    unseen="Gradients of most models have one dtype, or two in two rows.",
)
