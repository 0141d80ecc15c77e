"""What one training step takes: predicted by term and phase, measured, and the difference.

    python -m solution.memory_analysis                                 # GPT-2 small, 8 x 1024
    python -m solution.memory_analysis --model llama --preset 1b --no-measure
    python -m solution.memory_analysis --course                        # a course's published peaks

The prediction is made with fake tensors: no memory, no GPU. The measurement is two real steps, on a
GPU by CUDA's allocator, on the CPU by MemTracker; it is left out where the prediction says that it
cannot fit (exit status 3), and with `--no-measure`. On a GPU `--snapshot` writes a history for
pytorch.org/memory_viz. Results: a table, OUT/memory.json, and OUT/memory.png where matplotlib is
installed (the extra `plots`). MiB are 2^20 bytes.

Exit status: 0 done, 2 bad input, 3 does not fit.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from solution.config import GPT2Config, require_positive
from solution.data.shards import write_atomically
from solution.measure.activations import activation_bytes
from solution.measure.course_model import OUT_OF_MEMORY_AT, PUBLISHED_MIB, CourseModel
from solution.measure.estimate import PHASES, Prediction, predict
from solution.measure.measured import history, measured_step
from solution.models import families
from solution.precision import PRECISIONS
from solution.train_config import TrainConfig

__all__ = ["main"]

MIB = 2**20
DONE, BAD_INPUT, DOES_NOT_FIT = 0, 2, 3
TERMS = ("parameters", "gradients", "optimizer", "activations")
SECOND_MODEL = 475 * MIB  # alive in the course's sweep from batch 16 on
MARGIN, SHARE = 128 * MIB, 0.01


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m solution.memory_analysis", description="Memory of a training step."
    )
    parser.add_argument("--model", default="gpt2", help="gpt2 or llama")
    parser.add_argument("--preset", help="size (default: small, debug)")
    parser.add_argument("--vocab-size", type=int, help="words (default: the preset's)")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences")
    parser.add_argument("--sequence-length", type=int, help="tokens (default: at most 1024)")
    parser.add_argument("--attention", default="sdpa", help="plain, tiled, triton or sdpa")
    parser.add_argument("--activation-checkpointing", default="none", help="full or selective")
    parser.add_argument("--precision", default="fp32", help="of the forward: fp32 or bf16")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda: to measure on")
    parser.add_argument("--device-memory-gib", type=float, help="that there is (default: asked)")
    parser.add_argument("--no-measure", action="store_true", help="predict only")
    parser.add_argument("--snapshot", action="store_true", help="history for memory_viz (GPU)")
    parser.add_argument("--course", action="store_true", help="predict a course's peaks instead")
    parser.add_argument("--out", type=Path, default=Path("outputs/memory"), help="folder")
    flags = parser.parse_args(arguments)
    try:
        return _course(flags.out) if flags.course else _analyse(flags)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return BAD_INPUT


def _analyse(flags: argparse.Namespace) -> int:
    config, length, device = _checked(flags)
    options = {
        "attention": flags.attention,
        "activation_checkpointing": flags.activation_checkpointing,
    }
    with torch.device("meta"):
        model = families.build(config, **options)
    autocast = PRECISIONS[flags.precision]
    found = predict(
        model,
        batch_size=flags.batch_size,
        sequence_length=length,
        autocast=autocast,
        # What AdamW does on the device that is meant: many tensors at once on a GPU.
        make_optimizer=functools.partial(torch.optim.AdamW, foreach=device.type == "cuda"),
    )
    is_plain = (flags.attention, flags.activation_checkpointing, autocast) == ("sdpa", "none", None)
    closed = (
        activation_bytes(config, batch_size=flags.batch_size, sequence_length=length)
        if is_plain
        else None
    )
    room = _room(flags.device_memory_gib, device)
    fits = room is None or found.peak_bytes <= room
    title = (
        f"{flags.model} {flags.preset or ''}: {families.parameter_count(config):,} parameters, "
        f"{flags.batch_size} x {length} tokens, AdamW, {flags.precision}, {flags.attention}, "
        f"checkpointing {flags.activation_checkpointing}, {device.type}"
    )
    print(title)
    measured = None
    if fits and not flags.no_measure:
        measured = _measured(flags, config, length, device, options)
    print(_table(found, measured, closed))
    record = {
        "setup": title,
        "predicted": _record(found),
        "closed_form_activations": closed,
        "measured": measured,
        "room": room,
        "fits": fits,
    }
    _keep(flags.out, "memory", record, {"predicted": found})
    if room is not None and not fits:
        sys.stderr.write(
            f"error: expected a step that fits into {room / MIB:,.0f} MiB, got a predicted peak of "
            f"{found.peak_bytes / MIB:,.0f} MiB; take a smaller batch, "
            "--activation-checkpointing selective, or a larger device\n"
        )
    return DONE if fits else DOES_NOT_FIT


def _checked(flags: argparse.Namespace) -> tuple[Any, int, torch.device]:
    """The model's config, tokens per sequence, device; ValueError for what cannot be."""
    preset = flags.preset or ("small" if flags.model == "gpt2" else "debug")
    flags.preset = preset
    # One home for what is allowed: the training scripts' own checks.
    settings = TrainConfig(
        model=flags.model,
        preset=preset,
        sequence_length=flags.sequence_length,
        attention=flags.attention,
        precision=flags.precision,
        activation_checkpointing=flags.activation_checkpointing,
        device=flags.device,
    )
    if flags.precision == "fp16":
        raise ValueError("expected precision fp32 or bf16, got 'fp16', which needs a loss scale")
    vocabulary = flags.vocab_size or (50257 if flags.model == "gpt2" else 2048)
    config = settings.model_config(vocab_size=vocabulary)
    require_positive("batch_size", flags.batch_size)
    has_gpu = torch.cuda.is_available()
    if flags.device == "cuda" and not (has_gpu or flags.no_measure):
        raise ValueError("expected a GPU for --device cuda, found none; add --no-measure")
    kind = ("cuda" if has_gpu else "cpu") if flags.device == "auto" else flags.device
    if flags.snapshot and (kind != "cuda" or flags.no_measure):
        raise ValueError("--snapshot is a history of CUDA's allocator: expected --device cuda")
    return (
        config,
        flags.sequence_length or min(1024, config.max_sequence_length),
        torch.device(kind),
    )


def _room(gib: float | None, device: torch.device) -> int | None:
    """Bytes that a step may take; None where nobody tells."""
    if gib is not None:
        if not gib > 0:
            raise ValueError(f"expected --device-memory-gib > 0, got {gib}")
        return int(gib * 2**30)
    if device.type == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[1])
    meminfo = Path("/proc/meminfo")
    if device.type == "cpu" and meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _measured(
    flags: argparse.Namespace, config: Any, length: int, device: torch.device, options: Any
) -> dict[str, int]:
    with torch.device(device):
        model = families.build(config, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        ids = torch.randint(config.vocab_size, (flags.batch_size, length))
    path = None
    if flags.snapshot:
        flags.out.mkdir(parents=True, exist_ok=True)
        path = flags.out / "memory_snapshot.pickle"
        print(f"snapshot: {path.resolve()} (open it at pytorch.org/memory_viz)")
    with history(path):
        return measured_step(model, optimizer, ids, autocast=PRECISIONS[flags.precision])


def _table(found: Prediction, measured: dict[str, int] | None, closed: int | None) -> str:
    rows = [("MiB", "predicted", "measured", "error")]
    peaks = {f"peak of {phase}": found.peaks[phase].total for phase in PHASES}
    predicted = {term: found.terms[term] for term in TERMS} | peaks | {"peak": found.peak_bytes}
    predicted["after the step (often printed as the peak)"] = found.after_step
    names = {"after the step (often printed as the peak)": "after_step"}
    for name, size in predicted.items():
        real = (measured or {}).get(names.get(name, name))
        error = f"{100 * (size - real) / real:+.2f} %" if real else ""
        rows.append((name, f"{size / MIB:,.2f}", f"{real / MIB:,.2f}" if real else "", error))
    if measured and "reserved" in measured:
        rows.append(("reserved by the allocator", "", f"{measured['reserved'] / MIB:,.2f}", ""))
    width = max(len(row[0]) for row in rows)
    lines = [f"  {n:<{width}}  {p:>12}  {m:>12}  {e:>9}".rstrip() for n, p, m, e in rows]
    state = sum(found.terms[term] for term in TERMS[:3])
    lines.append(f"  parameters, gradients and optimizer together: {state / MIB:,.2f} MiB")
    if closed is not None:
        lines.append(f"  activations in closed form: {closed:,} bytes")
    return "\n".join(lines)


def _course(out: Path) -> int:
    """The course's peaks, predicted with a model like its own; ours beside it."""
    with torch.device("meta"):
        model, own = CourseModel(GPT2Config()), families.build(GPT2Config())
    foreach = functools.partial(torch.optim.AdamW, foreach=True)
    print("a GPT-2 small like the course's (materialised scores, dropout, its checkpointing), MiB")
    print("  batch  predicted  second model  published   error  within   ours needs")
    rows, all_within = [], True
    for size in (*PUBLISHED_MIB, OUT_OF_MEMORY_AT):
        predicted = functools.partial(
            predict, batch_size=size, sequence_length=1024, make_optimizer=foreach
        )
        found, ours = predicted(model, keeps_logits=True), predicted(own).peak_bytes
        extra = SECOND_MODEL if size > min(PUBLISHED_MIB) else 0
        peak, published = found.peak_bytes + extra, PUBLISHED_MIB.get(size)
        line = f"  {size:5}  {found.peak_bytes / MIB:9,.0f}  {extra / MIB:12,.0f}  "
        if published is None:
            is_within = peak > 80 * 2**30
            line += f"out of memory on 80 GB: {'yes' if is_within else 'NO'}"
        else:
            is_within = abs(peak - published * MIB) <= SHARE * published * MIB + MARGIN
            error = 100 * (peak / MIB / published - 1)
            line += f"{published:9,}  {error:+5.2f}%  {'yes' if is_within else 'NO':>6}"
        print(f"{line}   {ours / MIB:,.0f}")
        all_within &= is_within
        rows.append({"batch_size": size, "peak": peak, "published_mib": published, "ours": ours})
    _keep(out, "course", {"rows": rows}, {})
    return DONE if all_within else 1


def _record(found: Prediction) -> dict[str, Any]:
    peaks = {phase: peak.by_name for phase, peak in found.peaks.items()}
    return {"terms": found.terms, "peaks": peaks, "peak": found.peak_bytes}


def _keep(out: Path, name: str, record: dict[str, Any], bars: dict[str, Prediction]) -> None:
    """OUT/NAME.json and, where it can be drawn, OUT/NAME.png; says which, and what is replaced."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.json"
    said = "replaced" if path.exists() else "written"
    write_atomically(path, json.dumps(record, indent=2).encode() + b"\n")
    print(f"{said}: {path.resolve()}")
    if not bars:
        return
    if not importlib.util.find_spec("matplotlib"):
        print("no plot: matplotlib is not installed (python -m pip install 'trainspec[plots]')")
        return
    _plot(bars["predicted"], path.with_suffix(".png"))
    print(f"{said}: {path.with_suffix('.png').resolve()}")


def _plot(found: Prediction, path: Path) -> None:
    """The highest moment of each phase, its terms on top of one another."""
    from matplotlib.figure import Figure  # here: half a second, and optional

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    names = sorted({name for peak in found.peaks.values() for name in peak.by_name})
    below = [0.0] * len(PHASES)
    for name in names:
        sizes = [found.peaks[phase].by_name.get(name, 0) / MIB for phase in PHASES]
        axes.bar(PHASES, sizes, bottom=below, label=name)
        below = [low + size for low, size in zip(below, sizes, strict=True)]
    axes.set(ylabel="MiB", title="highest moment of each phase")
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
