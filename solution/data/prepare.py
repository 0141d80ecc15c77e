"""Text to token shards: `python -m solution.data.prepare [PATHS] --out DIR`.

    documents -> split train / val -> byte-level BPE, trained on train -> ids -> DIR/text_*.bin

1. Collect *.py, *.md and *.txt files below PATHS, in one order on every machine. Without PATHS: the
   sources of Python's own standard library, without tests: about 11 MB of real text that every
   machine has, with no network. Below a folder, other people's packages are skipped, and so are
   files that are so large that they are tables. So is text that is not UTF-8.
2. Every n-th document is validation data, evenly over the corpus. A single document is cut: its end
   is validation data.
3. Train a byte-level BPE with `tokenizers` on the training documents: any text round-trips.
4. Put the delimiter before each document, concatenate, cut into shards, write each atomically.
5. Write `tokenizer.json`, and last of all `meta.json`: it is there when everything else is.

The same arguments and the same text give the same bytes. Files of an earlier run in DIR, killed or
not, are removed first; they are known by name: text_train_000000.bin. Other shards in DIR are an
error. The standard library differs between versions of Python, and so do the ids: compare runs on
one machine, or prepare once and copy.

    python -m solution.data.prepare --out outputs/data                          # all of it, 6 s
    python -m solution.data.prepare mytext.txt --out outputs/mine               # 5 % for validation
    python -m solution.data.prepare --out outputs/demo --max-bytes 2000000      # a second or two
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from solution.config import require, require_positive
from solution.data.shards import (
    MAX_TOKENS,
    NUM_IDS,
    require_own_folder,
    write_atomically,
    write_shard,
)

DELIMITER = "<|endoftext|>"
OUR_SHARDS = r"text_(train|val)_\d{6}\.bin"
META, TOKENIZER = "meta.json", "tokenizer.json"
Ids = npt.NDArray[np.uint16]
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
SUFFIXES = {".py", ".txt", ".md"}
MAX_DOCUMENT_BYTES = 400_000  # beyond that it is a generated table, not text


def _collect(paths: Sequence[Path], max_bytes: int | None) -> tuple[list[str], int]:
    """Return the documents below `paths`, and the number of files that were skipped.

    Skipped are files that are not UTF-8, and too large ones that were not named themselves.

    Raises:
        ValueError: a path that is not there, or no text at all.
    """
    documents, num_bytes, num_skipped = [], 0, 0
    for path in _files(paths):
        data = path.read_bytes()
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = None
        if text is None or (len(data) > MAX_DOCUMENT_BYTES and path not in paths):
            num_skipped += 1
            continue
        if max_bytes is not None and num_bytes + len(data) > max_bytes:
            break
        if text:
            documents.append(text)
            num_bytes += len(data)
    if not documents:
        raise ValueError(
            f"expected text ({', '.join(sorted(SUFFIXES))} files) below "
            f"{[str(path) for path in paths] or 'the standard library'}, found none"
            + (f" within max_bytes={max_bytes}; raise it" if max_bytes else "")
        )
    return documents, num_skipped


def _split(documents: list[str], val_fraction: float) -> tuple[list[str], list[str]]:
    """(train, val) documents; val is spread evenly, and not empty if it can be.

    Of a single document the last part is val.
    """
    if val_fraction and len(documents) == 1:
        (text,) = documents
        cut = min(len(text) - 1, round(len(text) * (1 - val_fraction)))
        return ([text[:cut]], [text[cut:]]) if cut > 0 else ([text], [])
    is_val = [int((i + 1) * val_fraction) > int(i * val_fraction) for i in range(len(documents))]
    if val_fraction and len(is_val) > 1 and not any(is_val):
        is_val[-1] = True
    marked = list(zip(documents, is_val, strict=True))
    return [text for text, held in marked if not held], [text for text, held in marked if held]


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    """The text files at or below `paths`, sorted below each; default the standard library."""
    for path in paths or [Path(sysconfig.get_path("stdlib"))]:
        if path.is_file():
            yield path
        elif path.is_dir():
            found = (file for file in path.rglob("*") if file.suffix in SUFFIXES)
            # as_posix: one order on every system, whatever separates folders there.
            for file in sorted(found, key=lambda file: file.relative_to(path).as_posix()):
                folders = file.relative_to(path).parts[:-1]
                if file.is_file() and SKIPPED_FOLDERS.isdisjoint(folders):
                    yield file
        else:
            raise ValueError(f"{path}: expected a text file or a folder of them, found neither")


def prepare(
    paths: Sequence[Path],
    out: Path,
    *,
    vocab_size: int = 8192,
    shard_tokens: int = 1_000_000,
    val_fraction: float = 0.05,
    max_bytes: int | None = None,
) -> dict[str, Any]:
    """Make the shards of `paths` in `out`; return what `meta.json` says.

    Raises:
        ValueError: no text, bad settings, or `out` holds shards that this did not make.
    """
    words = f"in [257, {NUM_IDS}] (256 bytes and the delimiter, uint16)"
    require("vocab_size", vocab_size, words, lambda size: 257 <= size <= NUM_IDS)
    require("shard_tokens", shard_tokens, f"in [1, {MAX_TOKENS}]", lambda n: 0 < n <= MAX_TOKENS)
    require("val_fraction", val_fraction, "in [0, 1)", lambda part: 0 <= part < 1)
    if max_bytes is not None:
        require_positive("max_bytes", max_bytes)
    documents, num_skipped = _collect(paths, max_bytes)
    _clear(out)
    train, val = _split(documents, val_fraction)
    tokenizer = _train_tokenizer(train, vocab_size)
    shards: dict[str, int] = {}
    for split, part in (("train", train), ("val", val)):
        ids = _encode(tokenizer, part)
        for index, start in enumerate(range(0, len(ids), shard_tokens)):
            name = f"text_{split}_{index:06d}.bin"
            shards[name] = write_shard(out / name, ids[start : start + shard_tokens])
    meta = {
        "vocab_size": tokenizer.get_vocab_size(),
        "delimiter": tokenizer.token_to_id(DELIMITER),
        "num_documents": len(documents),
        "num_skipped": num_skipped,
        "shards": shards,
    }
    write_atomically(out / TOKENIZER, tokenizer.to_str().encode())
    write_atomically(out / META, json.dumps(meta, indent=2).encode() + b"\n")
    return meta


def vocabulary_of(folder: Path) -> int | None:
    """Return the number of words of the shards in `folder`; None if `prepare` did not write them.

    Raises:
        ValueError: there is a `meta.json`, and it is not ours.
    """
    path = folder / META
    if not path.exists():
        return None
    try:
        return int(json.loads(path.read_text())["vocab_size"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path}: expected what solution.data.prepare writes, got {error!r}; remove the file"
        ) from None


def _clear(out: Path) -> None:
    """Remove earlier shards of ours from `out`, meta.json first: it says the rest is there."""
    out.mkdir(parents=True, exist_ok=True)
    shards = require_own_folder(out, OUR_SHARDS)
    # A killed run leaves temporary files, with their file's name and a process id.
    for path in (out / META, *shards, *out.glob(".*.bin.*.tmp"), *out.glob(".*.json.*.tmp")):
        path.unlink(missing_ok=True)


def _train_tokenizer(documents: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE: all 256 bytes are words, so nothing is unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[DELIMITER],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    # A document that spells the delimiter out is text, not a border.
    tokenizer.encode_special_tokens = True
    return tokenizer


def _encode(tokenizer: Tokenizer, documents: list[str]) -> Ids:
    """All documents as one array of ids, the delimiter before each."""
    delimiter, pieces = np.array([tokenizer.token_to_id(DELIMITER)], np.uint16), []
    for start in range(0, len(documents), 64):  # all at once would hold every document's encoding
        batch = documents[start : start + 64]
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            pieces += [delimiter, np.array(encoding.ids, np.uint16)]
    return np.concatenate(pieces) if pieces else np.empty(0, np.uint16)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m solution.data.prepare",
        description="Text to token shards.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("paths", nargs="*", type=Path, help="files or folders (default: stdlib)")
    add("--out", type=Path, default=Path("outputs/data"), help="folder to fill")
    add("--vocab-size", type=int, default=8192)
    add("--shard-tokens", type=int, default=1_000_000)
    add("--val-fraction", type=float, default=0.05)
    add("--max-bytes", type=int, help="stop before the document that exceeds this")
    options = vars(parser.parse_args(arguments))
    started = time.perf_counter()
    try:
        meta = prepare(**options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    train, val = (
        sum(n for name, n in meta["shards"].items() if f"_{split}_" in name)
        for split in ("train", "val")
    )
    print(
        f"{options['out']}: {len(meta['shards'])} shards, {train:,} train and {val:,} val tokens, "
        f"vocabulary {meta['vocab_size']:,}, from {meta['num_documents']:,} documents "
        f"(skipped files: {meta['num_skipped']}) in {time.perf_counter() - started:.1f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
