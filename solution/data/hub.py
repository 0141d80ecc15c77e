"""Ready-made shards from the hub: `python -m solution.data.prepare --hub --out DIR`.

    kjj0/fineweb10B-gpt2 -> DIR/fineweb_val_000000.bin, DIR/fineweb_train_000001.bin, ...

FineWeb text in GPT-2's vocabulary, 103 training shards and one of validation, 10^8 tokens (200 MB)
each. `huggingface_hub`, an optional dependency, does the download; HF_ENDPOINT, HF_HOME and its
other settings hold here as everywhere.

Under torchrun the first rank downloads and the others wait; on machines that share no folder, run
this once on each. Every file is opened as a `Shard` before it counts, and one that is not right is
fetched anew, once. What is in DIR and whole is not asked for again, so an interrupted run goes on
(within a run the client itself goes on at the byte). `meta.json` is written last.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from solution import comm
from solution.console import status_line
from solution.data.shards import Shard, require_own_folder, write_atomically
from solution.world import distributed

REPOSITORY = "kjj0/fineweb10B-gpt2"
VOCABULARY, DELIMITER = 50257, 50256  # GPT-2's
NUM_TRAIN_SHARDS = 103
OUR_SHARDS = r"fineweb_(train|val)_\d{6}\.bin"
A_DAY_S = 86400.0


def download_once(out: Path, *, num_shards: int) -> tuple[dict[str, Any], bool] | None:
    """`download` by the first rank of the run; None on the others, once it is done.

    Raises:
        ValueError, OSError: as `download`, on the first rank; RuntimeError on the others.
    """
    with distributed(device="cpu", timeout_s=A_DAY_S) as world:
        result, has_failed = None, torch.zeros(())
        try:
            if world.is_first:
                result = download(out, num_shards=num_shards)
        except BaseException:
            has_failed += 1
            raise
        finally:
            comm.sum_over_ranks(has_failed)
        if has_failed:
            raise RuntimeError("expected the first rank to download, but it failed; see there")
        return result


def download(out: Path, *, num_shards: int) -> tuple[dict[str, Any], bool]:
    """The validation shard and the first `num_shards` training shards, in `out`.

    Returns:
        What `meta.json` says, and whether everything was there already.

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
    found: dict[str, tuple[int, bool]] = {}
    for index, name in enumerate(names):
        status_line(f"shard {index + 1} of {len(names)}: {name}")
        found[name] = _have(out, name)
    status_line("")
    meta = {
        "vocab_size": VOCABULARY,
        "delimiter": DELIMITER,
        "shards": {name: num_tokens for name, (num_tokens, _) in found.items()},
        "request": {"hub": REPOSITORY, "num_shards": num_shards, "format": 1},
    }
    write_atomically(out / "meta.json", json.dumps(meta, indent=2).encode() + b"\n")
    return meta, not any(was_fetched for _, was_fetched in found.values())


def _have(out: Path, name: str) -> tuple[int, bool]:
    """Return the tokens of shard `name`, and whether it had to be fetched."""
    for num_fetches in range(2):
        try:
            return len(Shard(out / name)), num_fetches > 0
        except ValueError:  # absent, or not whole
            _fetch(out, name, force=(out / name).exists())
    return len(Shard(out / name)), True


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
