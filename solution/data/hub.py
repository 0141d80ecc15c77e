"""Ready-made shards from the hub: `python -m solution.data.prepare --hub --out DIR`.

    kjj0/fineweb10B-gpt2 -> DIR/fineweb_val_000000.bin, DIR/fineweb_train_000001.bin, ...

FineWeb text in GPT-2's vocabulary, 103 training shards and one of validation, 10^8 tokens (200 MB)
each. `huggingface_hub`, an optional dependency, does the download; HF_ENDPOINT, HF_HOME and its
other settings hold here as everywhere.

Every file is opened as a `Shard` before it counts, and one that is not right is fetched anew, once.
A whole shard that is in DIR already is not asked for again, so an interrupted run goes on (within a
run the client itself goes on at the byte). `meta.json` is written last.
"""

import json
import sys
from pathlib import Path
from typing import Any

from solution.data.shards import Shard, require_own_folder, write_atomically

REPOSITORY = "kjj0/fineweb10B-gpt2"
VOCABULARY, DELIMITER = 50257, 50256  # GPT-2's
NUM_TRAIN_SHARDS = 103
OUR_SHARDS = r"fineweb_(train|val)_\d{6}\.bin"


def download(out: Path, *, num_shards: int) -> dict[str, Any]:
    """Fetch the validation shard and the first `num_shards` training shards into `out`.

    Returns:
        What `meta.json` says.

    Raises:
        ValueError: a bad number, foreign shards in `out`, no `huggingface_hub`, or a file that is
            no shard even when it was fetched twice.
        OSError: the hub cannot be reached, or has no such file.
    """
    if not 1 <= num_shards <= NUM_TRAIN_SHARDS:
        raise ValueError(f"expected 1 <= hub-shards <= {NUM_TRAIN_SHARDS}, got {num_shards}")
    names = ["fineweb_val_000000.bin"]
    names += [f"fineweb_train_{index:06d}.bin" for index in range(1, num_shards + 1)]
    out.mkdir(parents=True, exist_ok=True)
    require_own_folder(out, OUR_SHARDS)
    meta = {
        "vocab_size": VOCABULARY,
        "delimiter": DELIMITER,
        "shards": {name: _have(out, name) for name in names},
        "hub": REPOSITORY,
    }
    write_atomically(out / "meta.json", json.dumps(meta, indent=2).encode() + b"\n")
    return meta


def _have(out: Path, name: str) -> int:
    """Return the tokens of shard `name`, which is fetched if it is absent or not whole."""
    for _ in range(2):
        try:
            return len(Shard(out / name))
        except (FileNotFoundError, ValueError):
            _fetch(out, name, force=(out / name).exists())
    return len(Shard(out / name))


def _fetch(out: Path, name: str, *, force: bool) -> None:
    try:
        # Here: it is optional, and its import takes longer than a small corpus.
        from huggingface_hub import hf_hub_download
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError:
        raise ValueError(
            "expected the package huggingface_hub for --hub, found none; "
            "`pip install huggingface_hub`"
        ) from None
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        hf_hub_download(REPOSITORY, name, repo_type="dataset", local_dir=out, force_download=force)
    except Exception as error:  # the kinds differ between versions of the client
        raise OSError(
            f"expected {name} of {REPOSITORY}, got {type(error).__name__}: {error}; what was "
            "fetched is kept, run the same command again to go on"
        ) from error
