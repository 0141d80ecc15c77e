"""Operations: how many a model needs, how many a device can do, and what a larger model would take.

MFU, model FLOPs utilisation (Chowdhery et al. 2022, appendix B), is tokens/s x FLOPs/token over the
peak of the device. Recomputed operations do not count: the model did not ask for them.
The peak is the vendor's for *dense* products; tables print twice that with structured sparsity,
which no training uses. A device that is not in the table has no utilisation: half of a guess is not
a measurement.
"""

import re
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from solution.attention.flash import flops
from solution.config import require, require_positive
from solution.measure.memory import fake_twin

BYTES_PER_PARAMETER = 16  # in training in float32: itself, its gradient, two moments
SECONDS_PER_DAY, DAYS_PER_YEAR = 86_400, 365


class Device(NamedTuple):
    """Peaks in TFLOP/s, dense: 16-bit products on tensor cores, float32 without them."""

    words: str  # that the device's name must have, each as a whole word
    half: float
    single: float
    without: str = ""  # words that it must not have
    has_bfloat16: bool = True


DEVICES = (
    Device("B200", 2250, 75),
    Device("GH200", 989.4, 66.9),
    Device("H200", 989.4, 66.9, without="NVL"),
    Device("H200 NVL", 835.5, 60),
    Device("H100 HBM3", 989.4, 66.9),  # SXM; HBM3 is what its name says
    Device("H100 SXM5", 989.4, 66.9),
    Device("H100 PCIe", 756, 51),
    Device("H100 NVL", 835.5, 60),
    Device("H20", 148, 44),
    Device("A100", 312, 19.5),
    Device("L40S", 362.05, 91.6),
    Device("L4", 121, 30.3),
    Device("A10", 125, 31.2),
    Device("V100 SXM2", 125, 15.7, has_bfloat16=False),
    Device("V100 PCIE", 112, 14, has_bfloat16=False),
    Device("T4", 65, 8.1, has_bfloat16=False),
    Device("RTX 4090", 165.2, 82.6, without="Laptop"),
    Device("RTX 3090", 71, 35.6, without="Ti Laptop"),
)
"""Vendors' data sheets; the first that fits counts."""


def flops_per_token(model: nn.Module, *, sequence_length: int) -> int:
    """Return the operations of a forward and a backward, per token; matrix products only.

    PyTorch's FlopCounterMode counts a forward on fake tensors, without memory or work, for any
    module from ids `[1, sequence_length]` to logits. A backward is twice that: each product has two
    of its size, for either factor.

    Raises:
        ValueError: a length that is not a positive integer.
    """
    require_positive("sequence_length", sequence_length)
    with torch.random.fork_rng(), FakeTensorMode(allow_non_fake_inputs=True):
        twin = fake_twin(model, device="cpu")
        ids = torch.zeros(1, sequence_length, dtype=torch.int64)
        # PyTorch has no formula for its fused attention on CPU, and ours halve what is causal.
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        own = (getattr(torch.ops.trainspec, f"flash_attention_{x}") for x in ("tiled", "triton"))
        in_full = dict.fromkeys((fused, *own), lambda q, k, *_, **__: flops(q, k, causal=False))
        with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=in_full) as counter:
            twin(ids)
    return 3 * counter.get_total_flops() // sequence_length


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Return the dense operations per second of a device in a dtype; None where not known.

    >>> peak_flops("NVIDIA H200", torch.bfloat16)
    989400000000000.0
    >>> peak_flops("NVIDIA H20", torch.bfloat16), peak_flops("a device", torch.bfloat16)
    (148000000000000.0, None)
    """
    words = set(re.findall(r"[A-Za-z0-9]+", device_name))
    if "MIG" in words:  # a slice of a device
        return None
    for device in DEVICES:
        if set(device.words.split()) <= words and not set(device.without.split()) & words:
            found: dict[Any, float | None] = {
                torch.float16: device.half,
                torch.bfloat16: device.half if device.has_bfloat16 else None,
                torch.float32: device.single,
            }
            tflops = found.get(dtype)
            return None if tflops is None else tflops * 1e12
    return None


def model_flops_utilization(
    *,
    tokens_per_s: float,
    flops_per_token: float,
    device_name: str,
    dtype: torch.dtype,
) -> float | None:
    """Return the part of the device's peak that the model's own operations use, if it is known.

    >>> found = model_flops_utilization(
    ...     tokens_per_s=171_000, flops_per_token=854_438_400,
    ...     device_name="NVIDIA A100-SXM4-80GB", dtype=torch.bfloat16)
    >>> round(found, 3)
    0.468
    """
    peak = peak_flops(device_name, dtype)
    return None if peak is None else tokens_per_s * flops_per_token / peak


def extrapolate_training(
    *,
    tokens_per_s: float,
    num_parameters: int,
    target_parameters: int,
    target_tokens: int,
    device_memory_bytes: int,
) -> dict[str, Any]:
    """Return what a rate measured on one device would mean for a larger model.

    Assumes that tokens per second fall as parameters grow (products with weights are all the work,
    utilisation stays), that devices add nothing and lose nothing, and 16 bytes per parameter for
    the state of training in float32, activations left out. A year has 365 days.

    Returns:
        `tokens_per_s`, `days` and `years` of one device, `flops` (6 per parameter and token), and
        `num_devices_for_memory`, which the state alone demands.

    >>> found = extrapolate_training(tokens_per_s=32582.4, num_parameters=124_439_808,
    ...     target_parameters=10**12, target_tokens=10**13, device_memory_bytes=80 * 10**9)
    >>> round(found["tokens_per_s"], 3), round(found["years"]), found["num_devices_for_memory"]
    (4.055, 78208, 200)
    """
    require("tokens_per_s", tokens_per_s, "> 0", lambda value: value > 0)
    require_positive("num_parameters", num_parameters)
    require_positive("target_parameters", target_parameters)
    require_positive("target_tokens", target_tokens)
    require_positive("device_memory_bytes", device_memory_bytes)
    rate = tokens_per_s * num_parameters / target_parameters
    state_bytes = BYTES_PER_PARAMETER * target_parameters
    days = target_tokens / rate / SECONDS_PER_DAY
    return {
        "tokens_per_s": rate,
        "days": days,
        "years": days / DAYS_PER_YEAR,
        "flops": 6 * target_parameters * target_tokens,
        "num_devices_for_memory": -(-state_bytes // device_memory_bytes),
    }
