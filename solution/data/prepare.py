"""Text to token shards: `python -m solution.data.prepare [PATHS] --out DIR`.

    documents -> split train / val -> byte-level BPE, trained on train -> ids -> DIR/text_*.bin

1. Collect *.py, *.md, *.txt and *.jsonl files below PATHS, in one order on every machine. Without
   PATHS: the sources of Python's own standard library, without tests: about 11 MB of real text that
   every machine has, with no network. Each line of JSON lines (*.jsonl, *.jsonl.gz, *.json.gz) is a
   document, its `text`. Below a folder, other people's packages are skipped, and so are files that
   are so large that they are tables. So is text that is not UTF-8. How many is reported.
2. Every n-th document is validation data, evenly over the corpus. A single document is cut: its end
   is validation data.
3. Train a byte-level BPE with `tokenizers` on the training documents: any text round-trips. With
   `--tokenizer FILE` take that one, a `tokenizer.json` with `<|endoftext|>` in it.
4. Put the delimiter before each document, concatenate, cut into shards, write each atomically.
5. Write `tokenizer.json`, and last of all `meta.json`: it is there when everything else is.

The same arguments and the same text give the same bytes, and a second run reuses them. Otherwise it
first removes what it (or a run that was killed) once wrote there, which it knows by name:
text_train_000000.bin. Other shards in DIR are an error. The standard library differs between
versions of Python, and so do the ids: compare runs on one machine, or prepare once and copy.

    python -m solution.data.prepare --out outputs/data                          # all of it, 6 s
    python -m solution.data.prepare mytext.txt --out outputs/mine               # 5 % for validation
    python -m solution.data.prepare --out outputs/demo --max-bytes 2000000      # a second or two
    python -m solution.data.prepare --out outputs/fineweb --hub                 # see data/hub.py
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from solution.config import require, require_positive
from solution.console import status_line
from solution.data import hub
from solution.data.shards import (
    MAX_TOKENS,
    NUM_IDS,
    Shard,
    require_own_folder,
    write_atomically,
    write_shard,
)

DELIMITER = "<|endoftext|>"
OUR_SHARDS = r"text_(train|val)_\d{6}\.bin"
META, TOKENIZER = "meta.json", "tokenizer.json"
Ids = npt.NDArray[np.uint16]
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
SUFFIXES = {".py", ".txt", ".md", ".jsonl"}
JSON_LINES = (".jsonl", ".jsonl.gz", ".json.gz")
MAX_DOCUMENT_BYTES = 400_000  # beyond that it is a generated table, not text


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Settings of the shards.

    Raises:
        ValueError: a value outside its range.
    """

    vocab_size: int = 8192
    shard_tokens: int = 1_000_000
    val_fraction: float = 0.05
    max_bytes: int | None = None
    tokenizer: str | None = None  # a file; None trains one

    def __post_init__(self) -> None:
        require_positive("vocab_size", self.vocab_size)
        require_positive("shard_tokens", self.shard_tokens)
        words = f"in [257, {NUM_IDS}] (256 bytes and the delimiter, uint16)"
        require("vocab_size", self.vocab_size, words, lambda size: 257 <= size <= NUM_IDS)
        require("shard_tokens", self.shard_tokens, f"<= {MAX_TOKENS}", MAX_TOKENS.__ge__)
        require("val_fraction", self.val_fraction, "in [0, 1)", lambda part: 0 <= part < 1)
        if self.tokenizer is not None and self.vocab_size != DataConfig.vocab_size:
            raise ValueError("expected tokenizer or vocab_size, got both: a tokenizer has its own")
        if self.max_bytes is not None:
            require_positive("max_bytes", self.max_bytes)


@dataclass(frozen=True)
class Corpus:
    """Documents in order, and a hash of all of them."""

    documents: list[str]
    fingerprint: str
    num_bytes: int
    num_skipped: int  # files that are too large, documents that are not UTF-8

    @classmethod
    def collect(cls, paths: Sequence[Path], *, max_bytes: int | None) -> Corpus:
        """Read the documents below `paths` (default: the standard library), up to `max_bytes`.

        Raises:
            ValueError: a path that is not there, or no text at all.
        """
        digest, documents, num_bytes, num_skipped = hashlib.sha256(), [], 0, 0
        for data, text in _documents(paths):
            if text is None:
                num_skipped += bool(data)
                continue
            if max_bytes is not None and num_bytes + len(data) > max_bytes:
                break
            digest.update(len(data).to_bytes(8, "little") + data)
            documents.append(text)
            num_bytes += len(data)
        if not documents:
            raise ValueError(
                f"expected text ({', '.join(sorted(SUFFIXES))} files) below "
                f"{[str(path) for path in paths] or 'the standard library'}, found none"
                + (f" within max_bytes={max_bytes}; raise it" if max_bytes else "")
            )
        return cls(documents, digest.hexdigest(), num_bytes, num_skipped)

    def split(self, val_fraction: float) -> tuple[list[str], list[str]]:
        """(train, val) documents; val is spread evenly, and not empty if it can be.

        Of a single document the last part is val.
        """
        if val_fraction and len(self.documents) == 1:
            (text,) = self.documents
            cut = min(len(text) - 1, round(len(text) * (1 - val_fraction)))
            return ([text[:cut]], [text[cut:]]) if cut > 0 else ([text], [])
        is_val = [
            int((i + 1) * val_fraction) > int(i * val_fraction) for i in range(len(self.documents))
        ]
        if val_fraction and len(is_val) > 1 and not any(is_val):
            is_val[-1] = True
        marked = list(zip(self.documents, is_val, strict=True))
        return [text for text, held in marked if not held], [text for text, held in marked if held]


def _documents(paths: Sequence[Path]) -> Iterator[tuple[bytes, str | None]]:
    """Yield the bytes of each document and its text; None where there is none, or it is skipped."""
    named = {path for path in paths if path.is_file()}  # is taken, whatever its size
    for path in _files(paths):
        data = path.read_bytes()
        if path.name.endswith(JSON_LINES):
            for text in _texts(path, data):
                yield text.encode(), text or None
        elif len(data) > MAX_DOCUMENT_BYTES and path not in named:
            yield data, None
        else:
            try:
                yield data, data.decode() or None
            except UnicodeDecodeError:
                yield data, None


def _texts(path: Path, data: bytes) -> Iterator[str]:
    """Yield the `text` of each line of JSON lines."""
    try:
        lines = (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()
    except (OSError, EOFError) as error:
        raise ValueError(f"{path}: expected a whole gzip file, got {error}") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield str(json.loads(line)["text"])
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f'{path}, line {number}: expected a JSON object with "text", got {line[:60]!r}'
                ) from None


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


def prepare(paths: Sequence[Path], out: Path, config: DataConfig) -> tuple[dict[str, Any], bool]:
    """Make the shards of `paths` in `out`.

    Returns:
        What `meta.json` says, and whether it was there already.

    Raises:
        ValueError: no text, bad settings, or `out` holds shards that this did not make.
    """
    corpus = Corpus.collect(paths, max_bytes=config.max_bytes)
    request = {**asdict(config), "corpus": corpus.fingerprint, "format": 2}
    given = None if config.tokenizer is None else _read_tokenizer(Path(config.tokenizer))
    if given is not None:
        request["tokenizer"] = hashlib.sha256(given.to_str().encode()).hexdigest()
    old = read_meta(out)
    if old is not None and old["request"] == request and _is_complete(out, old):
        return old, True
    _clear(out)
    train, val = corpus.split(config.val_fraction)
    status_line(f"a tokenizer for {len(train)} documents")
    tokenizer = _train_tokenizer(train, config.vocab_size) if given is None else given
    shards: dict[str, int] = {}
    for split, documents in (("train", train), ("val", val)):
        ids = _encode(tokenizer, split, documents)
        for index, start in enumerate(range(0, len(ids), config.shard_tokens)):
            name = f"text_{split}_{index:06d}.bin"
            shards[name] = write_shard(out / name, ids[start : start + config.shard_tokens])
    status_line("")
    meta = {
        "vocab_size": tokenizer.get_vocab_size(),
        "delimiter": tokenizer.token_to_id(DELIMITER),
        "num_documents": len(corpus.documents),
        "num_skipped": corpus.num_skipped,
        "num_bytes": corpus.num_bytes,
        "shards": shards,
        "request": request,
    }
    write_atomically(out / TOKENIZER, tokenizer.to_str().encode())
    write_atomically(out / META, json.dumps(meta, indent=2).encode() + b"\n")
    return meta, False


def read_meta(folder: Path) -> dict[str, Any] | None:
    """Return what `prepare` wrote about the shards in `folder`; None if it wrote nothing there.

    Raises:
        ValueError: there is a `meta.json`, and it is not ours.
    """
    path = folder / META
    if not path.exists():
        return None
    try:
        meta = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, found {error}; remove the file") from None
    if not isinstance(meta, dict) or not {"vocab_size", "shards", "request"} <= meta.keys():
        raise ValueError(f"{path}: expected what solution.data.prepare writes; use another folder")
    return meta


def _is_complete(out: Path, meta: dict[str, Any]) -> bool:
    """Return whether every shard that `meta` lists is there and complete."""
    try:
        sizes = {name: len(Shard(out / name)) for name in meta["shards"]}
    except ValueError:
        return False
    return sizes == meta["shards"] and (out / TOKENIZER).exists()


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


def _read_tokenizer(path: Path) -> Tokenizer:
    """Read a `tokenizer.json`; ValueError if its ids are no token shards."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more special
        raise ValueError(f"{path}: expected a tokenizer.json, got {error}") from None
    size = tokenizer.get_vocab_size()
    require(f"{path}: vocabulary", size, f"<= {NUM_IDS} (uint16)", NUM_IDS.__ge__)
    if tokenizer.token_to_id(DELIMITER) is None:
        raise ValueError(f"{path}: expected {DELIMITER} in its vocabulary, which parts documents")
    tokenizer.encode_special_tokens = True  # as above
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _encode(tokenizer: Tokenizer, split: str, documents: list[str]) -> Ids:
    """All documents as one array of ids, the delimiter before each."""
    delimiter, pieces = np.array([tokenizer.token_to_id(DELIMITER)], np.uint16), []
    for start in range(0, len(documents), 64):
        status_line(f"encoding {split}: {start} of {len(documents)} documents")
        for encoding in tokenizer.encode_batch_fast(
            documents[start : start + 64], add_special_tokens=False
        ):
            pieces += [delimiter, np.array(encoding.ids, np.uint16)]
    return np.concatenate(pieces) if pieces else np.empty(0, np.uint16)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m solution.data.prepare",
        description="Text to token shards.",
        allow_abbrev=False,
    )
    default = DataConfig()
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders (default: stdlib)")
    parser.add_argument("--out", type=Path, default=Path("outputs/data"), help="folder to fill")
    parser.add_argument("--vocab-size", type=int, default=default.vocab_size)
    parser.add_argument("--shard-tokens", type=int, default=default.shard_tokens)
    parser.add_argument("--val-fraction", type=float, default=default.val_fraction)
    parser.add_argument("--tokenizer", help="tokenizer.json to use (default: train one)")
    parser.add_argument("--max-bytes", type=int, help="stop before the document that exceeds this")
    parser.add_argument("--hub", action="store_true", help="fetch FineWeb shards instead")
    parser.add_argument("--hub-shards", type=int, default=1, help="training shards of --hub")
    options = vars(parser.parse_args(arguments))
    paths, out = options.pop("paths"), options.pop("out")
    is_hub, num_shards = options.pop("hub"), options.pop("hub_shards")
    started = time.perf_counter()
    try:
        if is_hub and (paths or DataConfig(**options) != default):
            raise ValueError("expected --hub with --hub-shards and --out only: its tokens are made")
        made = (
            hub.download_once(out, num_shards=num_shards)
            if is_hub
            else prepare(paths, out, DataConfig(**options))
        )
    except (ValueError, OSError, RuntimeError) as error:
        status_line("")
        print(f"error: {error}", file=sys.stderr)
        return 2
    if made is not None:
        print(f"{out}: {_summary(*made)} in {time.perf_counter() - started:.1f} s")
    return 0


def _summary(meta: dict[str, Any], was_there: bool) -> str:
    train, val = (
        sum(n for name, n in meta["shards"].items() if f"_{split}_" in name)
        for split in ("train", "val")
    )
    source, verb = meta["request"].get("hub"), "fetched"
    if source is None:
        size = f"{meta['num_bytes'] / 1e6:.1f} MB, {meta['num_skipped']} skipped"
        source, verb = f"{meta['num_documents']:,} documents ({size})", "made"
    verb = "reused (same arguments, same text)" if was_there else verb
    return (
        f"{verb} {len(meta['shards'])} shards, {train:,} train and {val:,} val tokens, "
        f"vocabulary {meta['vocab_size']:,}, from {source}"
    )


if __name__ == "__main__":
    sys.exit(main())
