"""Tokens per second of one device, what part of it that uses, and what a larger model would take.

    python -m solution.throughput                                      # GPT-2 small, 8 x 1024
    python -m solution.throughput --batch-sizes 1 4 8 16 32 64         # a row each
    python -m solution.throughput --attentions sdpa tiled plain        # end to end, side by side
    python -m solution.throughput --model llama --preset debug --precision bf16 --compile

Warm-up until steady, then the median step with its spread (`solution.measure.throughput`); FLOPs
per token are the model's own, in closed form; MFU only for devices whose peak is known. A batch
size that does not fit is a row of its table. On the CPU, where no allocator keeps a peak, memory is
the prediction of `solution.memory_analysis`. Results go to OUT/throughput.json, a sweep also to
OUT/throughput.png if matplotlib is there (extra `plots`).

Exit status: 0 done, 2 bad input, 3 out of memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from solution.attention import unavailable
from solution.config import ModelConfig, require_positive
from solution.data.shards import write_atomically
from solution.measure.estimate import predict
from solution.measure.flops import extrapolate_training, model_flops_utilization
from solution.measure.throughput import is_out_of_memory, measure_throughput, sweep_batch_sizes
from solution.measure.throughput_plot import can_plot, plot_sweep
from solution.models import families
from solution.precision import PRECISIONS
from solution.train_config import TrainConfig

__all__ = ["main"]

DONE, BAD_INPUT, OUT_OF_MEMORY = 0, 2, 3
MIB, GB = 2**20, 10**9
TARGET_PARAMETERS, TARGET_TOKENS, TARGET_DEVICE = 10**12, 10**13, 80 * GB


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m solution.throughput", description="Tokens per second of training steps."
    )
    parser.add_argument("--model", default="gpt2", help="gpt2 or llama")
    parser.add_argument("--preset", help="size (default: small, debug)")
    parser.add_argument("--vocab-size", type=int, help="words (default: the preset's)")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences")
    parser.add_argument("--batch-sizes", type=int, nargs="+", help="sweep over these as well")
    parser.add_argument("--sequence-length", type=int, help="tokens (default: at most 1024)")
    parser.add_argument("--steps", type=int, default=20, help="that are timed, after the warm-up")
    parser.add_argument("--attention", default="sdpa", help="plain, tiled, triton or sdpa")
    parser.add_argument("--attentions", nargs="+", help="compare these, one after another")
    parser.add_argument("--precision", default="fp32", help="of the forward: fp32 or bf16")
    parser.add_argument("--tf32", action="store_true", help="float32 products in TF32 (GPU)")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--fused", action="store_true", help="fused AdamW")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--out", type=Path, default=Path("outputs/throughput"), help="folder")
    flags = parser.parse_args(arguments)
    try:
        config, length, device = _checked(flags)
        return _Run(flags, config, length, device).report()
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return BAD_INPUT


def _checked(flags: argparse.Namespace) -> tuple[ModelConfig, int, torch.device]:
    flags.preset = flags.preset or ("small" if flags.model == "gpt2" else "debug")
    settings = TrainConfig(
        model=flags.model,
        preset=flags.preset,
        sequence_length=flags.sequence_length,
        attention=flags.attention,
        precision=flags.precision,
        device=flags.device,
    )
    if flags.precision == "fp16":
        raise ValueError("expected precision fp32 or bf16, got 'fp16', which needs a loss scale")
    for size in (flags.batch_size, *(flags.batch_sizes or ())):
        require_positive("batch size", size)
    require_positive("steps", flags.steps)
    vocabulary = flags.vocab_size or (50257 if flags.model == "gpt2" else 2048)
    config = settings.model_config(vocab_size=vocabulary)
    has_gpu = torch.cuda.is_available()
    if flags.device == "cuda" and not has_gpu:
        raise ValueError("expected a GPU for --device cuda, found none")
    kind = ("cuda" if has_gpu else "cpu") if flags.device == "auto" else flags.device
    for name in (flags.attention, *(flags.attentions or ())):
        if name not in TrainConfig.attentions:
            raise ValueError(f"expected attentions among {TrainConfig.attentions}, got {name!r}")
        if reason := unavailable(name, kind):
            raise ValueError(f"expected an attention that runs on {kind}: {reason}")
    return (
        config,
        flags.sequence_length or min(1024, config.max_sequence_length),
        torch.device(kind),
    )


class _Run:
    """One call of the command."""

    def __init__(
        self, flags: argparse.Namespace, config: ModelConfig, length: int, device: torch.device
    ) -> None:
        self.flags, self.config, self.length, self.device = flags, config, length, device
        self.flops = families.flops_per_token(config, sequence_length=length)
        self.num_parameters = families.parameter_count(config)
        self.dtype = PRECISIONS[flags.precision] or torch.float32
        is_gpu = device.type == "cuda"
        self.peak_kind = "peak" if is_gpu else "predicted peak"
        self.device_name = torch.cuda.get_device_name(device) if is_gpu else "cpu"
        if is_gpu:
            torch.backends.cuda.matmul.allow_tf32 = flags.tf32

    def report(self) -> int:
        """Measure what was asked for, print it, keep it."""
        flags = self.flags
        print(
            f"{flags.model} {flags.preset}: {self.num_parameters:,} parameters, batch "
            f"{flags.batch_size} x {self.length}, {flags.precision}{', TF32' * flags.tf32}, "
            f"{flags.attention}{', compiled' * flags.compile}, AdamW{', fused' * flags.fused}, "
            f"{self.device_name}"
        )
        try:
            found = self.measure(flags.batch_size, flags.attention)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            found = None
        if found is None:
            sys.stderr.write(
                f"error: out of memory with batch {flags.batch_size}; take a smaller --batch-size\n"
            )
            return OUT_OF_MEMORY
        larger = extrapolate_training(
            tokens_per_s=found["tokens_per_s"],
            num_parameters=self.num_parameters,
            target_parameters=TARGET_PARAMETERS,
            target_tokens=TARGET_TOKENS,
            device_memory_bytes=TARGET_DEVICE,
        )
        print(self.lines(found, larger))
        compared = {name: self.compared(name) for name in flags.attentions or ()}
        rows = self.sweep() if flags.batch_sizes else []
        record = {"found": found, "larger": larger, "attentions": compared, "sweep": rows}
        path = flags.out / "throughput.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        said = "replaced" if path.exists() else "written"
        write_atomically(path, json.dumps(record, indent=2).encode() + b"\n")
        print(f"{said}: {path.resolve()}")
        if rows:
            print(self.plot(rows, path.with_suffix(".png")))
        return DONE

    def plot(self, rows: list[dict[str, Any]], path: Path) -> str:
        """Draw the sweep where that can be done; what was done."""
        if not can_plot():
            return "no plot: matplotlib is not installed (python -m pip install 'trainspec[plots]')"
        said = "replaced" if path.exists() else "written"
        title = f"{self.flags.model} {self.flags.preset}, {self.length} tokens, {self.device_name}"
        plot_sweep(rows, path, title=title, peak=self.peak_kind)
        return f"{said}: {path.resolve()}"

    def build(self, batch_size: int, attention: str | None = None) -> Callable[[], None]:
        """A training step that owns its model and optimizer."""
        flags, config = self.flags, self.config
        torch.manual_seed(0)
        with torch.device(self.device):
            module = families.build(config, attention=attention or flags.attention)
            ids = torch.randint(config.vocab_size, (batch_size, self.length))
        optimizer = torch.optim.AdamW(module.parameters(), lr=3e-4, fused=flags.fused or None)
        model: Any = torch.compile(module) if flags.compile else module
        autocast = PRECISIONS[flags.precision]

        def step() -> None:
            with torch.autocast(self.device.type, dtype=autocast, enabled=autocast is not None):
                loss = F.cross_entropy(model(ids).flatten(0, -2), ids.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    def measure(self, batch_size: int, attention: str) -> dict[str, Any]:
        """The report of one setup, with its utilisation."""
        tokens = batch_size * self.length
        found = measure_throughput(
            self.build(batch_size, attention),
            tokens_per_step=tokens,
            clock=time.perf_counter,
            num_steps=self.flags.steps,
        )
        nothing = measure_throughput(
            lambda: None, tokens_per_step=1, clock=time.perf_counter, num_steps=101
        )
        return {
            **found,
            "tokens_per_step": tokens,
            "flops_per_token": self.flops,
            "own_overhead_s": nothing["step_s"],
            "mfu": model_flops_utilization(
                tokens_per_s=found["tokens_per_s"],
                flops_per_token=self.flops,
                device_name=self.device_name,
                dtype=self.dtype,
                tf32=self.flags.tf32,
            ),
        }

    def lines(self, found: dict[str, Any], larger: dict[str, Any]) -> str:
        """The course's output block, with what it leaves out."""
        timed, step_s = found["num_steps"], found["step_s"]
        mfu = "- (peak of this device is not known)" if found["mfu"] is None else ""
        mfu = mfu or f"{100 * found['mfu']:.1f} % of its dense peak in {self.dtype}"
        steady = "" if found["is_steady"] else "  NOT STEADY: other work on this machine?"
        return (
            f"  warm-up       {found['num_warmup_steps']} steps{steady}\n"
            f"  total tokens  {timed * found['tokens_per_step']:,} in {timed} timed steps\n"
            f"  seconds/step  {step_s:.4f} median, {found['min_s']:.4f} fastest, quartiles "
            f"{found['iqr_s']:.4f} apart\n"
            f"  tokens/s      {found['tokens_per_s']:,.1f}\n"
            f"  steps/s       {found['steps_per_s']:.2f}\n"
            f"  FLOPs/token   {self.flops:,} ({found['tokens_per_s'] * self.flops / 1e12:.3f} "
            f"TFLOP/s)\n"
            f"  MFU           {mfu}\n"
            f"  own overhead  {1e6 * found['own_overhead_s']:.1f} microseconds per step\n"
            f"1T parameters, 10T tokens, at tokens/s that fall as parameters grow:\n"
            f"  tokens/s      {larger['tokens_per_s']:.3f}\n"
            f"  days          {larger['days']:,.0f} ({larger['years']:,.1f} years of 365 days)\n"
            f"  FLOPs         {larger['flops']:.1e} (6 per parameter and token)\n"
            f"  devices       {larger['num_devices_for_memory']} of 80 GB for parameters, "
            "gradients and moments alone (16 bytes each, no activations)"
        )

    def compared(self, attention: str) -> dict[str, Any]:
        """One line of end-to-end throughput."""
        found = self.measure(self.flags.batch_size, attention)
        print(f"  {attention:<7} {found['tokens_per_s']:>12,.1f} tokens/s", flush=True)
        return found

    def sweep(self) -> list[dict[str, Any]]:
        """A row per batch size; on the CPU the peak is predicted."""
        rows = sweep_batch_sizes(
            self.build,
            batch_sizes=self.flags.batch_sizes,
            sequence_length=self.length,
            clock=time.perf_counter,
            memory=_CudaPeak() if self.device.type == "cuda" else _NoPeak(),
            num_steps=self.flags.steps,
        )
        print(f"  batch      tokens/s  {self.peak_kind} MiB")
        for row in rows:
            if self.device.type != "cuda":
                row["peak_bytes"] = self.predicted(row["batch_size"])
            peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / MIB:,.0f}"
            rate = "out of memory" if row["is_oom"] else f"{row['tokens_per_s']:,.1f}"
            print(f"  {row['batch_size']:5}  {rate:>12}  {peak}")
        return rows

    def predicted(self, batch_size: int) -> int:
        """Of a step without its memory."""
        with torch.device("meta"):
            model = families.build(self.config, attention=self.flags.attention)
        autocast = PRECISIONS[self.flags.precision]
        found = predict(
            model, batch_size=batch_size, sequence_length=self.length, autocast=autocast
        )
        return found.peak_bytes


class _CudaPeak:
    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated()


class _NoPeak:
    """The CPU's allocator keeps none."""

    def reset_peak(self) -> None: ...

    def peak_bytes(self) -> int:
        return 0


if __name__ == "__main__":
    sys.exit(main())
