"""Tokens per second of one device, what part of it that uses, and what a larger model would take.

    python -m solution.throughput                                      # GPT-2 small, 8 x 1024
    python -m solution.throughput --batch-sizes 1 4 8 16 32 64         # a row each
    python -m solution.throughput --model llama --preset debug --precision bf16 --compile

The median step once it is steady, with its spread (`solution.measure.throughput`); MFU only for
devices whose peak is known. A batch size that does not fit is a row of its table. On the CPU, where
no allocator keeps a peak, memory is the prediction of `solution.memory_analysis`. Results go to
OUT/throughput.json.

Exit status: 0 done, 2 bad input, 3 out of memory.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from solution.config import require_positive
from solution.console import significant
from solution.measure import flops
from solution.measure.memory import training_loss
from solution.measure.throughput import is_out_of_memory, measure_throughput, sweep_batch_sizes
from solution.measure.workload import BAD_INPUT, DONE, Workload, keep, parser

OUT_OF_MEMORY = 3
MIB = 2**20
LARGER = {"target_parameters": 10**12, "target_tokens": 10**13, "device_memory_bytes": 80 * 10**9}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    command = parser("throughput", "Tokens per second of training steps.")
    command.add_argument("--batch-sizes", type=int, nargs="+", help="sweep over these as well")
    command.add_argument("--steps", type=int, default=20, help="that are timed, after the warm-up")
    command.add_argument("--compile", action="store_true", help="torch.compile the model")
    flags = command.parse_args(arguments)
    try:
        for size in flags.batch_sizes or ():
            require_positive("batch size", size)
        require_positive("steps", flags.steps)
        return _report(Workload(flags), flags)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return BAD_INPUT
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        said = f"out of memory with batch {flags.batch_size}; take a smaller --batch-size"
        sys.stderr.write(f"error: {said}\n")
        return OUT_OF_MEMORY


def _report(work: Workload, flags: argparse.Namespace) -> int:
    """Measure what was asked for, print it, keep it."""
    is_gpu = work.device.type == "cuda"
    device = torch.cuda.get_device_name(work.device) if is_gpu else "cpu"
    print(f"{work.title}{', compile' if flags.compile else ''}, {device}")
    tokens = work.batch_size * work.length
    step = _build(work, flags, work.batch_size)
    found = measure_throughput(
        step, tokens_per_step=tokens, clock=time.perf_counter, num_steps=flags.steps
    )
    del step  # with its model
    rate = found["tokens_per_s"]
    per_token = flops.flops_per_token(work.shape(), sequence_length=work.length)
    mfu = flops.model_flops_utilization(
        tokens_per_s=rate, flops_per_token=per_token, device_name=device, dtype=work.dtype
    )
    found |= {"tokens_per_step": tokens, "flops_per_token": per_token, "mfu": mfu}
    larger = flops.extrapolate_training(
        tokens_per_s=rate, num_parameters=work.num_parameters, **LARGER
    )
    print(_lines(found, larger, work.dtype))
    rows = _sweep(work, flags) if flags.batch_sizes else []
    keep(flags.out / "throughput.json", {"found": found, "larger": larger, "sweep": rows})
    return DONE


def _build(work: Workload, flags: argparse.Namespace, batch_size: int) -> Callable[[], None]:
    """Return a training step that owns its model and optimizer."""
    module, ids = work.build(batch_size)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-4)
    model: Any = torch.compile(module) if flags.compile else module

    def step() -> None:
        training_loss(model, ids, work.dtype).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _lines(found: dict[str, Any], larger: dict[str, Any], dtype: torch.dtype) -> str:
    """Return the course's output block, with what it leaves out."""
    timed, count = found["num_steps"], found["flops_per_token"]
    mfu = "- (peak of this device is not known)"
    if found["mfu"] is not None:
        mfu = f"{significant(100 * found['mfu'], 3)} % of its dense peak in {dtype}"
    years = significant(larger["years"], decimals=1)
    steady = "" if found["is_steady"] else "  NOT STEADY: other work on this machine?"
    return (
        f"  warm-up       {found['num_warmup_steps']} steps{steady}\n"
        f"  total tokens  {timed * found['tokens_per_step']:,} in {timed} timed steps\n"
        f"  seconds/step  {significant(found['step_s'])} median, {significant(found['min_s'])} "
        f"fastest, quartiles {significant(found['iqr_s'])} apart\n"
        f"  tokens/s      {significant(found['tokens_per_s'], decimals=1)}\n"
        f"  steps/s       {significant(found['steps_per_s'])}\n"
        f"  FLOPs/token   {count:,} ({significant(found['tokens_per_s'] * count / 1e12)} TFLOP/s)\n"
        f"  MFU           {mfu}\n"
        f"1T parameters, 10T tokens, at tokens/s that fall as parameters grow:\n"
        f"  tokens/s      {significant(larger['tokens_per_s'])}\n"
        f"  days          {significant(larger['days'])} ({years} years of 365 days)\n"
        f"  FLOPs         {larger['flops']:.1e} (6 per parameter and token)\n"
        f"  devices       {larger['num_devices_for_memory']} of 80 GB for parameters, "
        "gradients and moments alone (16 bytes each, no activations)"
    )


def _sweep(work: Workload, flags: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row per batch size, printed as it comes; on the CPU the peak is predicted."""
    is_gpu = work.device.type == "cuda"
    print(f"  batch      tokens/s  {'' if is_gpu else 'predicted '}peak MiB", flush=True)
    memory = SimpleNamespace(
        reset_peak=torch.cuda.reset_peak_memory_stats if is_gpu else lambda: None,
        peak_bytes=torch.cuda.max_memory_allocated if is_gpu else lambda: 0,
    )
    rows = []
    for size in flags.batch_sizes:
        [row] = sweep_batch_sizes(
            lambda size: _build(work, flags, size),
            batch_sizes=[size],
            sequence_length=work.length,
            clock=time.perf_counter,
            memory=memory,
            num_steps=flags.steps,
        )
        if not is_gpu:
            row["peak_bytes"] = work.predict(size).peak_bytes
        peak = "-" if row["peak_bytes"] is None else significant(row["peak_bytes"] / MIB)
        rate = "out of memory" if row["is_oom"] else significant(row["tokens_per_s"], decimals=1)
        print(f"  {size:5}  {rate:>12}  {peak}", flush=True)
        rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
