"""Tokens per second of a loader, what it keeps in memory, and what it costs to find a place.

One rank reads a shard of 200 million random tokens, which lies in the page cache, in batches of
int64 inputs and targets that own their memory. Arms, all in one process:

    mapped          the shard as a memory map that is held, a slice of it cast twice per batch: the
                    way of modded-nanogpt
    NAME            token_loader of each --impl
    torchdata       StatefulDataLoader over a map-style dataset of the same sequences, cut from the
                    same map, collated into batches in the same process; where it is installed
    mapped again    the first once more: the A/A arm (see paired.py)

Time: every round reads the same number of tokens with each arm, going on where the last one ended
and opening the shard anew at its end; first touches of a page are part of reading it. It is the
process's time on the cores: nothing here waits for a disk or another process, and so other programs
disturb it least.
Memory: the largest resident size of the process during a full pass, less the one before it. Pages
of a map that were touched are resident, so whoever holds one grows by the file.
Place: after load_state_dict, what the first batch takes in microseconds and in bytes asked of the
system, at the beginning of the shard and at its end.

Bounds: NAME against mapped 1, against torchdata a fifth; memory 5 MB; the first batch at the end
asks for as many bytes as at the beginning, to the byte. The exit status is 1 when one is missed or
the A/A arm voids the run.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spec_tests.benchmarks import paired
from spec_tests.rig.rank import Context
from spec_tests.rig.world import Worlds
from spec_tests.target import load, parse

RESULTS = Path(__file__).with_name("results")
MAPPED, TORCHDATA, AGAIN = "mapped", "torchdata", "mapped again"
BOUNDS = {MAPPED: 1.0, TORCHDATA: 0.2}
MOST_GROWTH_BYTES = 5_000_000
TOKENS_PER_ROUND = 2**24
PLACES = (0.0, 0.25, 0.5, 0.75, 0.99)
"""Parts of the shard at which a resumed run begins."""
TRIES = 25  # of each place

Batch = tuple[torch.Tensor, torch.Tensor]


class Sequences:
    """A map-style dataset: sequence k of a shard, inputs and targets, int64 `[length]`."""

    def __init__(self, path: Path, length: int) -> None:
        self.tokens, self.length = _map(path), length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> Batch:
        start = index * self.length
        return _pair(self.tokens[start : start + self.length + 1], (self.length,))


def _map(path: Path) -> np.memmap[Any, Any]:
    return np.memmap(path, dtype="<u2", mode="r", offset=1024)


def _pair(tokens: Any, shape: tuple[int, ...]) -> Batch:
    inputs, targets = tokens[:-1].astype(np.int64), tokens[1:].astype(np.int64)
    return torch.from_numpy(inputs).view(shape), torch.from_numpy(targets).view(shape)


def mapped_pass(path: Path, batch_size: int, length: int) -> Iterator[Batch]:
    """One pass over a shard that is mapped for as long as it takes."""
    tokens, size = _map(path), batch_size * length
    for start in range(0, len(tokens) - size, size):
        yield _pair(tokens[start : start + size + 1], (batch_size, length))


def has_torchdata() -> bool:
    """Whether the optional arm can be measured."""
    return importlib.util.find_spec("torchdata") is not None


# ------------------------------------------------------------------------------------- in the rank


def passes(
    impls: list[str], path: Path, batch_size: int, length: int
) -> dict[str, Callable[[], Iterator[Batch]]]:
    """Arm to what begins a pass over the shard."""
    arms = {MAPPED: lambda: mapped_pass(path, batch_size, length)}
    for name in impls:
        new_loader = functools.partial(_loader, name, path, batch_size, length)
        arms[name] = functools.partial(_begin, new_loader)
    if has_torchdata():
        package = importlib.import_module("torchdata.stateful_dataloader")
        # Only whole batches, as everywhere here.
        loader = package.StatefulDataLoader(
            Sequences(path, length), batch_size=batch_size, num_workers=0, drop_last=True
        )
        arms[TORCHDATA] = lambda: iter(loader)
    arms[AGAIN] = arms[MAPPED]
    return arms


def _loader(name: str, path: Path, batch_size: int, length: int) -> Any:
    return load(parse(name)).token_loader(
        [path], batch_size=batch_size, sequence_length=length, rank=0, world_size=1
    )


def _begin(new_loader: Callable[[], Any]) -> Iterator[Batch]:
    return iter(new_loader())


def body(
    ctx: Context, path: Path, impls: list[str], batch_size: int, length: int, num_rounds: int
) -> dict[str, Any]:
    """Rank body: memory of a pass, then times, then places."""
    arms = passes(impls, path, batch_size, length)
    firsts = [next(begin()) for begin in arms.values()]  # this is also the warm-up
    if not all(
        torch.equal(a, b) for first in firsts for a, b in zip(first, firsts[0], strict=True)
    ):
        raise ValueError(f"expected equal first batches of {list(arms)}, got {firsts}")
    del firsts
    growth = {
        label: _growth(begin) for label, begin in arms.items() if label not in (TORCHDATA, AGAIN)
    }
    endless = [_endless(begin) for begin in arms.values()]
    num_batches = max(1, TOKENS_PER_ROUND // (batch_size * length))
    rounds = [_round(endless, num_batches, index) for index in range(num_rounds)]
    places = {
        name: _places(functools.partial(_loader, name, path, batch_size, length)) for name in impls
    }
    return {
        "labels": list(arms),
        "growth": growth,
        "rounds": rounds,
        "tokens": num_batches * batch_size * length,
        "places": places,
    }


def _endless(begin: Callable[[], Iterator[Batch]]) -> Iterator[Batch]:
    while True:
        yield from begin()


def _round(arms: list[Iterator[Batch]], num_batches: int, index: int) -> list[float]:
    """Core seconds of each arm."""
    seconds = [0.0] * len(arms)
    for number in paired.order(len(arms), index):
        start = time.process_time()
        for _ in range(num_batches):
            next(arms[number])
        seconds[number] = time.process_time() - start
    return seconds


def _growth(begin: Callable[[], Iterator[Batch]]) -> int | None:
    """Bytes by which this process grew at the most during a pass; None where that is not told."""
    if not Path("/proc/self/statm").exists():
        return None
    gc.collect()
    before, most = _resident_bytes(), 0
    for number, _ in enumerate(begin()):
        if number % 64 == 0:
            most = max(most, _resident_bytes())
    return max(most, _resident_bytes()) - before


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _places(new_loader: Callable[[], Any]) -> list[dict[str, float | None]]:
    """Time and bytes read until the first batch after a resume, place by place."""
    loader = new_loader()
    next(iter(loader))
    one = loader.state_dict()
    [(key, step)] = one.items() if len(one) == 1 else [(None, 0)]
    if key is None:
        return []  # only a state that is one number can be made up without reading up to it
    found = []
    for part in PLACES:
        state = {key: int(part * len(loader)) * step}
        seconds, before = [], _bytes_asked_for()
        for _ in range(TRIES):
            start = time.perf_counter()
            loader.load_state_dict(state)
            next(iter(loader))
            seconds.append(time.perf_counter() - start)
        after = _bytes_asked_for()
        asked = None if before is None or after is None else (after - before) / TRIES
        found.append({"part": part, "us": 1e6 * statistics.median(seconds), "bytes": asked})
    return found


def _bytes_asked_for() -> int | None:
    """What this process has read from files so far, from the page cache too; None if not told."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return int(dict(line.split(": ") for line in lines)["rchar"])


# ----------------------------------------------------------------------------------- in the parent


def summarise(found: dict[str, Any], impls: list[str]) -> dict[str, Any]:
    """Medians of the rounds, their ratios, and the verdicts."""
    labels: list[str] = found["labels"]
    times = dict(zip(labels, zip(*found["rounds"], strict=True), strict=True))
    ratios = {
        base: {label: paired.ratio(times[label], times[base]) for label in labels if label != base}
        for base in BOUNDS
        if base in times
    }
    result = {
        "num_rounds": len(found["rounds"]),
        "rate": {label: found["tokens"] / statistics.median(times[label]) for label in labels},
        "ratios": ratios,
        "growth": found["growth"],
        "places": found["places"],
    }
    result["verdicts"] = _verdicts(result, impls)
    return result


def _verdicts(result: dict[str, Any], impls: list[str]) -> list[str]:
    again = result["ratios"][MAPPED][AGAIN]
    if paired.is_void(again):
        low, high = paired.AA_RANGE
        return [f"void: mapped against itself {again}, expected within {low}-{high}"]
    said = []
    for name in impls:
        for base, of_base in result["ratios"].items():
            high, bound = of_base[name].high, BOUNDS[base]
            word = "holds" if high <= bound else "missed"
            said.append(f"{word}: {name} against {base} at most {high:.3f}, bound {bound}")
        growth = result["growth"][name]
        if growth is not None:
            word = "holds" if growth <= MOST_GROWTH_BYTES else "missed"
            said.append(f"{word}: {name} grew by {growth:,} bytes, bound {MOST_GROWTH_BYTES:,}")
        asked = {place["bytes"] for place in result["places"][name]} - {None}
        if asked:
            word = "holds" if max(asked) - min(asked) < 1024 else "missed"  # files of /proc itself
            said.append(f"{word}: {name} asks for {min(asked):,.0f} to {max(asked):,.0f} bytes")
    return said


def render(result: dict[str, Any], environment: dict[str, str], what: str) -> str:
    """The result as Markdown."""
    lines = ["# Reading tokens, paired against a memory map and torchdata", ""]
    lines += [f"- {key}: {value}" for key, value in environment.items()]
    lines.append(f"- {what}; ratios of times are paired medians with their 95 % interval")
    rows = [
        ("arm", "M tokens/core s", *(f"time against {base}" for base in result["ratios"]), "MB")
    ]
    for label, rate in result["rate"].items():
        ratios = (str(of.get(label, "1")) for of in result["ratios"].values())
        growth = result["growth"].get(label)
        rows.append(
            (label, f"{rate / 1e6:.0f}", *ratios, "" if growth is None else f"{growth / 1e6:.1f}")
        )
    lines += [
        "",
        paired.table(rows),
        "",
        "Seconds on the core; MB: growth of resident memory over one pass. ",
    ]
    lines[-1] += f"{result['num_rounds']} rounds."
    for name, places in result["places"].items():
        rows = [("resumed at", "first batch, us", "bytes asked for")]
        for place in places:
            asked = "" if place["bytes"] is None else f"{place['bytes']:,.0f}"
            rows.append((f"{place['part']:.0%}", f"{place['us']:.0f}", asked))
        lines += ["", f"## {name} after load_state_dict", "", paired.table(rows)]
    lines += ["", *[f"- {verdict}" for verdict in result["verdicts"]]]
    if TORCHDATA not in result["ratios"]:
        lines.append("- torchdata is not installed and was not measured (pip install torchdata)")
    return "\n".join(lines) + "\n"


def write_random_shard(path: Path, num_tokens: int) -> None:
    """A shard of uniform ids, written in pieces."""
    draw = np.random.default_rng(0)
    with path.open("wb") as file:
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, num_tokens
        file.write(header.tobytes())
        for start in range(0, num_tokens, 2**24):
            count = min(2**24, num_tokens - start)
            file.write(draw.integers(0, 50257, count, dtype=np.uint16).astype("<u2").tobytes())


def main(argv: list[str]) -> int:
    """Measure, print, and write `loader.md` and `loader.json`."""
    parser = argparse.ArgumentParser(prog="python -m spec_tests.benchmarks loader")
    parser.add_argument("--impl", action="append", help="as for the suite; default: solution")
    parser.add_argument("--tokens", type=int, default=200_000_000, help="in the shard")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--sequence-length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--folder", help="for the shard; default: the system's temporary folder")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(argv)
    impls = options.impl or ["solution"]
    if not has_torchdata():
        sys.stderr.write(
            "torchdata is not installed: that arm is left out (pip install torchdata)\n"
        )
    sizes = (options.batch_size, options.sequence_length)
    worlds = Worlds()
    try:
        with tempfile.TemporaryDirectory(prefix="trainspec-", dir=options.folder) as folder:
            path = Path(folder) / "x_train_000000.bin"
            write_random_shard(path, options.tokens)
            [found] = worlds.world(1).run(
                body, path, impls, *sizes, options.rounds, timeout_s=3600.0, grace_s=60.0
            )
    finally:
        worlds.close()
    result, environment = summarise(found, impls), paired.environment()
    what = f"one process, 1 thread, {options.tokens:,} tokens in batches of {sizes[0]} x {sizes[1]}"
    text = render(result, environment, what)
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "loader.md").write_text(text)
    plain = {b: {k: vars(r) for k, r in of.items()} for b, of in result["ratios"].items()}
    record = {"environment": environment, "result": {**result, "ratios": plain}}
    (options.out / "loader.json").write_text(json.dumps(record, indent=1) + "\n")
    return int(any(not verdict.startswith("holds") for verdict in result["verdicts"]))
