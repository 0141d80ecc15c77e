"""`python -m spec_tests fuzz [--files 1000] [--seed 0]`: damaged shards, one after another.

A right shard of random tokens is cut, extended, has bits flipped, is replaced by something foreign,
by nothing, by a folder, by what is no file, or claims another number of tokens. `token_loader` of
`--impl` reads each in a live rank, which may hang or die without harm. What is right follows from
the format alone, decided here without the code under test:

- the bytes are a shard in which a sequence fits: every token of the pass is that of the file;
- they are not: a ValueError (or a FileNotFoundError) that names the file, what was expected and
  what was found, and for bytes at which offset;
- never another error, another token, a hang or the end of the process.

Exit status 1 if any file shows otherwise.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import struct
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_tests.reference_tests.training import shard
from spec_tests.rig.ranks.errors import RankDied, RankHung, RankRaised
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.world import World, Worlds
from spec_tests.rig.ranks.zygote import start_zygote
from spec_tests.rig.shards import HEADER_BYTES, MAGIC, VERSION
from spec_tests.target import load, parse

LENGTH = 4  # tokens per sequence
TIMEOUT_S = 20.0

Bytes = bytes | bytearray


@dataclass(frozen=True)
class Reading:
    """What the loader made of a file: tokens of all sequences in order, or an error."""

    windows: list[tuple[list[int], list[int]]] | None
    error: str
    is_refusal: bool


def read(ctx: Context, impl: str, path: Path) -> Reading:
    """Rank body: one pass over one file."""
    try:
        loader = load(parse(impl)).token_loader(
            [path], batch_size=1, sequence_length=LENGTH, rank=0, world_size=1
        )
        windows = [(x[0].tolist(), y[0].tolist()) for x, y in loader]
    except Exception as error:
        is_refusal = isinstance(error, ValueError | FileNotFoundError)
        return Reading(None, f"{type(error).__name__}: {error}", is_refusal)
    return Reading(windows, "", False)


# --------------------------------------------------------------------------------------- the files


def flipped(data: bytearray, draw: random.Random) -> Bytes:
    """One to three bits turned over: half of them where the header means something."""
    for _ in range(draw.randint(1, 3)):
        end = 12 if draw.random() < 0.5 else len(data)
        data[draw.randrange(end)] ^= 1 << draw.randrange(8)
    return data


def foreign(data: bytearray, draw: random.Random) -> Bytes:
    """Text, noise, an archive, the other byte order, the version with wider tokens."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("tokens", bytes(data))
    swapped = struct.pack(f">{len(data) // 2}H", *struct.unpack(f"<{len(data) // 2}H", data))
    wider = struct.pack("<3i", MAGIC, 2, 30).ljust(HEADER_BYTES, b"\0") + bytes(120)
    noise = draw.randbytes(draw.randrange(4096))
    return draw.choice([b"once upon a time " * 99, noise, archive.getvalue(), swapped, wider])


def miscounted(data: bytearray, draw: random.Random) -> Bytes:
    """A header that claims another number of tokens, or a negative one, or the most there are."""
    count = (len(data) - HEADER_BYTES) // 2
    others = [-1, -(2**31), 2**31 - 1, 2**30, count + 1, count - 1, draw.randrange(2**31)]
    struct.pack_into("<i", data, 8, draw.choice(others))
    return data


def folder(path: Path, draw: random.Random) -> None:
    """A folder, with a shard in it or without."""
    path.mkdir()
    if draw.random() < 0.5:
        (path / path.name).write_bytes(_right(draw))


def no_file(path: Path, draw: random.Random) -> None:
    """A pipe that nobody writes to, a device that never ends, a link to nowhere, nothing."""
    kind = draw.randrange(4)
    if kind == 0:
        os.mkfifo(path)
    elif kind < 3:
        path.symlink_to("/dev/zero" if kind == 1 else path.with_name("nowhere"))


DAMAGES: dict[str, Callable[[bytearray, random.Random], Bytes]] = {
    "truncated": lambda data, draw: data[: draw.randrange(len(data))],
    "extended": lambda data, draw: data + draw.randbytes(draw.randint(1, 9)),
    "flipped": flipped,
    "foreign": foreign,
    "miscounted": miscounted,
}
"""What is made of the bytes of a right shard."""
RARE: dict[str, Callable[[Path, random.Random], None]] = {
    "empty": lambda path, draw: path.touch(),
    "folder": folder,
    "no file": no_file,
}
"""What stands in the place of a file; there are few different ones."""
KINDS = (*DAMAGES, *RARE)


def _right(draw: random.Random) -> bytearray:
    return bytearray(shard(draw.randrange(64), seed=draw.randrange(2**32)))


def write(kind: str, path: Path, draw: random.Random) -> None:
    """Make a file of that kind."""
    if kind in RARE:
        RARE[kind](path, draw)
    else:
        path.write_bytes(DAMAGES[kind](_right(draw), draw))


# ------------------------------------------------------------------------------------ the judgement


def tokens_of(path: Path) -> list[int] | None:
    """The tokens of a shard, if that is what the path leads to."""
    if not path.is_file():
        return None
    data = path.read_bytes()
    if len(data) < HEADER_BYTES:
        return None
    magic, version, count = struct.unpack_from("<3i", data)
    if (magic, version) != (MAGIC, VERSION) or len(data) != HEADER_BYTES + 2 * count:
        return None
    return list(struct.unpack_from(f"<{count}H", data, HEADER_BYTES))


def complaint(path: Path, found: Reading) -> str | None:
    """What is wrong with what the loader made of the file; None if nothing is."""
    tokens = tokens_of(path)
    if tokens is not None and len(tokens) > LENGTH:
        starts = range(0, len(tokens) - LENGTH, LENGTH)
        right = [(tokens[k : k + LENGTH], tokens[k + 1 : k + 1 + LENGTH]) for k in starts]
        return None if found.windows == right else f"expected {right}, got {found}"
    if found.windows is not None:
        return f"expected a refusal, got {found.windows}"
    if not found.is_refusal:
        return f"expected a ValueError, got {found.error}"
    if tokens is not None:
        return None  # a shard, but without a sequence in it
    wanted = [path.name, "expected"] + (["offset"] if path.is_file() else [])
    missing = [word for word in wanted if word not in found.error]
    if missing or not ("found" in found.error or "got" in found.error):
        return f"expected the message to say {wanted} and what was found, got {found.error}"
    return None


def examine(world: World, impl: str, path: Path) -> tuple[str, str | None]:
    """What became of one file, and what is wrong with that."""
    try:
        [found] = world.run(read, impl, path, timeout_s=TIMEOUT_S, grace_s=5.0)
    except (RankDied, RankHung, RankRaised) as error:  # it hung, or its process is gone
        return "lost", f"expected tokens or an error, got {error}"
    return "read" if found.windows is not None else "refused", complaint(path, found)


# --- the command


def run(num_files: int, seed: int, impl: str) -> tuple[Counter[tuple[str, str]], list[str]]:
    """So many files: how many of each kind were read or refused, and what is wrong."""
    draw, counts, wrong = random.Random(seed), Counter[tuple[str, str]](), []
    weights = [1 if kind in RARE else 5 for kind in KINDS]
    worlds = Worlds()
    try:
        with tempfile.TemporaryDirectory(prefix="trainspec-") as place:
            for number in range(num_files):
                [kind] = draw.choices(KINDS, weights)
                path = Path(place) / f"fuzzed_{number:06d}.bin"
                write(kind, path, draw)
                outcome, problem = examine(worlds.world(1), impl, path)
                counts[kind, outcome] += 1
                if problem is not None:
                    wrong.append(f"{path.name}, {kind}: {problem}")
    finally:
        worlds.close()
    return counts, wrong


def table(counts: Counter[tuple[str, str]]) -> str:
    """Files by kind and outcome."""
    outcomes = ("read", "refused", "lost")
    lines = ["| file | count | read | refused | lost |", "|---|--:|--:|--:|--:|"]
    for kind in (*KINDS, "all"):
        row: list[Any] = [sum(counts[k, o] for k in KINDS if kind in (k, "all")) for o in outcomes]
        lines.append(f"| {kind} | {sum(row)} | {' | '.join(map(str, row))} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """The command; 0 if every file was read as it is or refused in words."""
    parser = argparse.ArgumentParser(prog="python -m spec_tests fuzz")
    parser.add_argument("--files", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of kinds and damages")
    parser.add_argument("--impl", default="solution", help="as for the suite")
    options = parser.parse_args(arguments)
    start_zygote()
    begun = time.perf_counter()
    counts, wrong = run(options.files, options.seed, options.impl)
    end = f"{options.files - len(wrong)} of {options.files} as they must be; "
    end += f"{time.perf_counter() - begun:.0f} s"
    sys.stdout.write("\n".join([table(counts), "", *wrong, end]) + "\n")
    return 1 if wrong else 0
