"""PyTorch's own wrappers, behind the contract: a peer that is judged like anyone else.

`ddp` is DistributedDataParallel as it comes; `ddp_bucketed` is the same with the bucket size given
and with gradients as views of the buckets. `fully_shard` is FSDP2 as it comes, `fsdp` the same with
every Linear and Embedding a unit and an all-reduce for the rest. `sharded_optimizer` is
ZeroRedundancyOptimizer. `flash_attention` is scaled_dot_product_attention with the contract's
alignment. Known deviations are declared in torch.toml.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp import fully_shard as fully_shard_in_place
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from spec_tests.impls.shared import VisibleState, no_sync, replicas, whole
from spec_tests.impls.torch_trainer import (
    build_fsdp_trainer,
    build_trainer,
    build_zero1_trainer,
)

ddp, ddp_bucketed = replicas(DistributedDataParallel)


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """scaled_dot_product_attention, its causal mask aligned bottom-right.

    PyTorch's own `is_causal` is top-left: the same only where seq_q equals seq_k. It does not
    return the log-sum-exp, which is therefore computed beside it, with all scores in memory. Nor
    does it refuse all that does not fit: the CPU kernel takes a v of another length than k.

    Raises:
        ValueError: the tensors do not fit each other.
    """
    _check(q, k, v)
    if q.ndim == 3 and k.ndim == 3:
        found = flash_attention(
            *(t.unsqueeze(1) for t in (q, k, v)), causal=causal, scale=scale, return_lse=return_lse
        )
        return (found[0].squeeze(1), found[1].squeeze(1)) if return_lse else found.squeeze(1)  # type: ignore[union-attr]  # a tensor without return_lse
    num_blind = q.shape[-2] - k.shape[-2] if causal or not k.shape[-2] else 0
    if num_blind > 0:  # rows that see no key: PyTorch's kernels disagree about them
        seeing = flash_attention(
            q[..., num_blind:, :], k, v, causal=causal, scale=scale, return_lse=True
        )
        out = F.pad(seeing[0], (0, 0, num_blind, 0))
        return (out, F.pad(seeing[1], (num_blind, 0), value=-torch.inf)) if return_lse else out
    hidden = None
    if causal and q.shape[-2] != k.shape[-2]:
        hidden = ~q.new_ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(-num_blind)
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=None if hidden is None else ~hidden,
        is_causal=causal and hidden is None,
        scale=scale,
        enable_gqa=q.ndim == 4 and q.shape[1] != k.shape[1],
    )
    return (out, _log_sum_exp(q, k, causal=causal, scale=scale)) if return_lse else out


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            raise ValueError(
                f"expected {name} to be a tensor of floating point, got {tensor!r:.60}"
            )
    alike = {name: (t.dtype, t.device, t.ndim) for name, t in (("q", q), ("k", k), ("v", v))}
    if len({*alike.values()}) > 1:
        raise ValueError(f"expected q, k and v of one dtype, device and ndim, got {alike}")
    fits = q.ndim in (3, 4) and q.shape[0] == k.shape[0] and q.shape[-1] == k.shape[-1]
    heads, kv_heads = (q.shape[1], k.shape[1]) if q.ndim == 4 else (1, 1)
    if not fits or k.shape != v.shape or (heads % kv_heads if kv_heads else heads):
        raise ValueError(f"expected q, k and v to fit, got {[tuple(t.shape) for t in (q, k, v)]}")


def _log_sum_exp(
    q: torch.Tensor, k: torch.Tensor, *, causal: bool, scale: float | None
) -> torch.Tensor:
    """[batch, heads, seq_q] of the scores that each query sees; every query sees one."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    keys = k.to(wide).repeat_interleave(group, dim=1).transpose(-1, -2)
    scores = q.to(wide) @ keys * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        seen = torch.ones_like(scores, dtype=torch.bool).tril(k.shape[-2] - q.shape[-2])
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.logsumexp(dim=-1)


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    **options: Any,
) -> Any:
    """FSDP2, with whatever other options it has."""
    fully_shard_in_place(
        module,
        mesh=mesh,
        reshard_after_forward=reshard_after_forward,
        mp_policy=mp_policy or MixedPrecisionPolicy(),
        **options,
    )
    return module


def fsdp(module: nn.Module, *, compute_dtype: torch.dtype | None = None) -> nn.Module:
    """FSDP2 on every Linear and Embedding that shares nothing; the rest is replicated.

    Replicated is also what is inside of an `nn.MultiheadAttention`, which does not call it.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype)
    uses = Counter(id(p) for m in module.modules() for p in m._parameters.values())
    attentions = [part for part in module.modules() if isinstance(part, nn.MultiheadAttention)]
    inside = {part for attention in attentions for part in attention.modules()}
    for layer in module.modules():
        if layer in inside or not isinstance(layer, nn.Linear | nn.Embedding):
            continue
        if uses[id(layer.weight)] == 1:
            fully_shard(layer, mp_policy=policy)
    rest = {p for p in module.parameters() if not isinstance(p, DTensor)}
    for parameter in rest:
        if parameter.is_floating_point() and dist.get_world_size() > 1:
            is_trained = parameter.requires_grad
            parameter.requires_grad_()  # a frozen one, which takes no hook, may be thawed
            parameter.register_post_accumulate_grad_hook(_average)
            parameter.requires_grad_(is_trained)
    return module if isinstance(module, FSDPModule) else fully_shard(module, ignored_params=rest)


def _average(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    mean = parameter.grad.contiguous()
    dist.all_reduce(mean)
    parameter.grad = mean / dist.get_world_size()


@torch.no_grad()
def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """`full_tensor()` of every parameter; a root that a forward left unsharded is resharded."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    named: dict[str, Any] = dict(model.named_parameters())
    return {
        name: p.full_tensor() if isinstance(p, DTensor) else p.detach().clone()
        for name, p in named.items()
    }


__all__ = [
    "MixedPrecisionPolicy",
    "build_fsdp_trainer",
    "build_trainer",
    "build_zero1_trainer",
    "ddp",
    "ddp_bucketed",
    "flash_attention",
    "fsdp",
    "full_parameters",
    "fully_shard",
    "no_sync",
    "register_fsdp_forward_method",
]


class _Sharded(VisibleState, ZeroRedundancyOptimizer):
    """ZeroRedundancyOptimizer whose `.state` is what this rank owns."""


def sharded_optimizer(
    params: Iterable[Any],
    optimizer_cls: type[Optimizer],
    *,
    process_group: ProcessGroup | None = None,
    **kwargs: Any,
) -> ZeroRedundancyOptimizer:
    """ZeroRedundancyOptimizer with its defaults."""
    return _Sharded(params, optimizer_class=optimizer_cls, process_group=process_group, **kwargs)


def full_optimizer_state(optimizer: ZeroRedundancyOptimizer) -> dict[str, Any]:
    """Its own consolidation, once towards each rank; the next one drops what it collected."""
    state: dict[str, Any] = {}
    for rank in range(dist.get_world_size(optimizer.process_group)):
        optimizer.consolidate_state_dict(to=rank)
        if rank == dist.get_rank(optimizer.process_group):
            state = optimizer.state_dict()
    return state


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """torch.nn.utils.clip_grad_norm_, and the value of the DTensor that it may return."""
    return whole(nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite))


def memory_estimate(model: nn.Module, *, batch_size: int, sequence_length: int) -> dict[str, int]:
    """MemTracker under FakeTensorMode, on a step of a fake copy of the model.

    Raises:
        ValueError: a size that is not positive.
    """
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType

    if min(batch_size, sequence_length) <= 0:
        raise ValueError(f"expected positive sizes, got {batch_size} and {sequence_length}")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        with FakeCopyMode(mode):
            twin = copy.deepcopy(model)
        trained = [p for p in twin.parameters() if p.requires_grad]
        device = next(twin.parameters()).device
        ids = torch.zeros(batch_size, sequence_length, dtype=torch.int64, device=device)
        optimizer = torch.optim.AdamW(trained)
        for p in twin.parameters():
            p.grad = torch.empty_like(p) if p.requires_grad else None
        optimizer.step()
        optimizer.zero_grad()
        tracker = MemTracker()
        tracker.track_external(twin, optimizer)
        with tracker:
            loss = F.cross_entropy(twin(ids).flatten(0, -2), ids.flatten())
            left = tracker.get_tracker_snapshot("current")[device]
            loss.backward()
            complete = tracker.get_tracker_snapshot("current")[device]
            optimizer.step()
            optimizer.zero_grad()
        peak = tracker.get_tracker_snapshot("peak")[device]
    return {
        "parameter_bytes": left[_MemRefType.PARAM],
        "gradient_bytes": complete[_MemRefType.GRAD],
        "optimizer_bytes": left[_MemRefType.OPT],
        "activation_bytes": left[_MemRefType.ACT] + left[_MemRefType.TEMP],
        "peak_bytes": peak["Total"],
    }


def flops_per_token(model: nn.Module, *, sequence_length: int) -> int:
    """FlopCounterMode over a forward and a backward on `meta`, where attention is two products."""
    from torch.utils.flop_counter import FlopCounterMode

    twin = copy.deepcopy(model).to("meta")
    ids = torch.zeros(1, sequence_length, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter:
        twin(ids).sum().backward()
    return counter.get_total_flops() // sequence_length


def measure_throughput(
    step: Callable[[], Any], *, tokens_per_step: int, clock: Callable[[], float]
) -> dict[str, Any]:
    """torch.utils.benchmark.Timer with the clock given; its fixed warm-up is all there is.

    Raises:
        ValueError: no tokens.
    """
    from torch.utils.benchmark import Measurement, Timer

    if tokens_per_step <= 0:
        raise ValueError(f"expected tokens_per_step > 0, got {tokens_per_step}")
    calls = 0

    def counted() -> None:
        nonlocal calls
        calls += 1
        step()

    timer = Timer("step()", globals={"step": counted}, timer=clock)
    timer.timeit(3)
    [found] = Measurement.merge([timer.timeit(1) for _ in range(12)])
    return {
        "tokens_per_s": tokens_per_step / found.median,
        "steps_per_s": 1 / found.median,
        "step_s": found.median,
        "min_s": min(found.times),
        "iqr_s": found.iqr,
        "num_warmup_steps": calls - len(found.times),
        "num_steps": len(found.times),
        "is_steady": not found.has_warnings,
    }
