"""Near-misses of clipping in what few runs meet: one changed line of the reference's."""

from spec_tests.museum.card import Patched, near_miss


class Changed(Patched):
    """A changed line of the reference."""

    module = "solution.parallel.clip"


@near_miss("clip.sums-over-one-axis", rejected_by="clip.norm.two-divided-axes")
class SumsOverOneAxis(Changed):
    """Sums over the first axis of the mesh that divides the tensor.

    From: A mesh with one such axis, for which it was written.
    Unseen: FSDP alone, or tensor parallelism alone.
    """

    find = "        if not placement.is_replicate() and mesh.size(axis) > 1\n    )"
    replace = "        if not placement.is_replicate() and mesh.size(axis) > 1\n    )[:1]"


@near_miss("clip.over-the-first-mesh", rejected_by="clip.norm.two-meshes")
class OverTheFirstMesh(Changed):
    """Sums over the ranks that share the first sharded tensor, whatever the others lie on.

    From: NVIDIA-NeMo/Automodel issue 3816, Megatron-LM issue 5916.
    Unseen: A model without experts lies on one mesh.
    """

    find = "own = divided.setdefault(_divided_over(tensor), [])"
    replace = """over = _divided_over(tensor)
        own = divided.setdefault(next(filter(None, divided), over) if over else over, [])"""


@near_miss("clip.asks-finiteness-of-twos", rejected_by="clip.nonfinite.error-on-all-ranks")
class AsksFinitenessOfTwos(Changed):
    """Raises for what is not finite only where squares are summed.

    From: a sum that is not finite tells all; a maximum was added later.
    Unseen: Nearly all clip by the 2-norm.
    """

    find = "if error_if_nonfinite and not math.isfinite(norm):"
    replace = "if error_if_nonfinite and norm_type != math.inf and not math.isfinite(norm):"


@near_miss("clip.takes-the-list-as-it-is", rejected_by="clip.norm.tied-once")
class TakesTheListAsItIs(Changed):
    """Counts and scales a tensor as often as it is listed.

    From: PyTorch's own.
    Unseen: `parameters()` gives a tied weight once.
    """

    find = "return list(dict.fromkeys(found))"
    replace = "return found"


@near_miss("clip.norms-in-their-dtype", rejected_by="clip.norm.dtypes")
class NormsInTheirDtype(Changed):
    """Rounds the norm of each gradient to the gradient's dtype.

    From: `torch._foreach_norm` without a dtype, PyTorch's own among others.
    Unseen: Gradients of float32.
    """

    find = "torch._foreach_norm(alike, order, dtype=wide)"
    replace = "torch._foreach_norm(alike, order, dtype=dtype)"


@near_miss("clip.takes-summands-for-shards", rejected_by="clip.norm.unreduced")
class TakesSummandsForShards(Changed):
    """Takes gradients that are not reduced yet for divided ones.

    From: `not placement.is_replicate()`, and nothing else.
    Unseen: Wrappers reduce before anybody clips.
    """

    find = "    if any(placement.is_partial() for placement in layout.placements):"
    replace = "    if not layout.placements:"


@near_miss("clip.makes-new-gradients", rejected_by="clip.scaling.in-place")
class MakesNewGradients(Changed):
    """Puts scaled copies into `.grad`.

    From: `p.grad = p.grad * factor`.
    Unseen: Values are right; views into a reducer's buckets are none any more.
    """

    find = "        if tensor.grad is not None:\n            local = _local(tensor.grad)"
    replace = (
        "        if tensor.grad is not None:\n            tensor.grad = tensor.grad.clone()\n"
        "            local = _local(tensor.grad)"
    )


@near_miss("clip.divides-by-the-norm", rejected_by="clip.scaling.zeros")
class DividesByTheNorm(Changed):
    """Divides by the norm itself.

    From: The formula of the paper, without what keeps it from dividing by zero.
    Unseen: No norm is zero, and the last bits are nobody's concern.
    """

    find = "(max_norm / (norm + 1e-6))"
    replace = "(max_norm / norm)"


@near_miss("clip.scales-the-last-run", rejected_by="clip.scaling.dtypes-in-turn")
class ScalesTheLastRun(Changed):
    """Groups gradients by dtype, and keeps of each dtype those that came in a row last.

    From: `dict(itertools.groupby(...))` of what is not sorted
    Unseen: Gradients of most models have one dtype, or two in two rows.
    """

    find = "            gradients.setdefault((local.device, local.dtype), []).append(local)"
    replace = """            kind = (local.device, local.dtype)
            is_new = not gradients or next(reversed(gradients)) != kind
            before = [] if is_new else gradients[kind]
            gradients.pop(kind, None)
            gradients[kind] = [*before, local]"""
