"""torch.distributed.checkpoint, made safe: tensors only, verified, and no pickle that runs code.

The library writes each tensor once, divides the writing over the ranks, and reads into any other
layout. Three of its habits are not ours. It saves into a folder that exists, and a crash then
leaves a mix of old and new that loads without a word: we only ever give it a fresh one. It reads
`.metadata` with `pickle.load`, and objects with `weights_only=False`: here `.metadata` may name the
few classes that it is made of, and there are no objects. It does not notice a flipped bit: each
tensor lies in a ZIP archive with its own check sum, which `damage` verifies.
"""

import io
import pickle
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.utils._pytree import tree_map_only

from solution import comm

METADATA = ".metadata"
_SINGLE = "torch.distributed is disabled"  # the library's warning in a run of one process
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},  # their home in Python 3.13
}


def write_tensors(tensors: dict[str, Any], folder: Path, group: comm.Group) -> None:
    """Write this rank's part of `tensors` (nested by name) into a fresh folder; all ranks call it.

    Raises:
        CheckpointException, on all ranks alike: writing failed on some.
    """
    writer = dcp.FileSystemWriter(folder, sync_files=True, overwrite=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_SINGLE)
        dcp.save(tensors, storage_writer=writer, process_group=group)


def read_tensors(tensors: dict[str, Any], folder: Path, group: comm.Group) -> None:
    """Fill `tensors` (nested by name) from a folder; all ranks call it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_SINGLE)
        dcp.load(tensors, storage_reader=_Reader(folder), process_group=group)


def read_metadata(folder: Path) -> Metadata:
    """Which tensor lies where.

    Raises:
        pickle.UnpicklingError: the file names anything that metadata is not made of.
    """
    with (folder / METADATA).open("rb") as file:
        metadata = _MetadataUnpickler(file).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"expected metadata in {METADATA}, got {type(metadata)}")
    for name, entry in metadata.state_dict_metadata.items():
        # Anything else is an object, which the library would unpickle.
        if not isinstance(entry, TensorStorageMetadata):
            raise pickle.UnpicklingError(f"expected a tensor under {name!r}, got {type(entry)}")
    return metadata


def damage(folder: Path, *, part: int, of: int) -> str:
    """Return what is wrong with a folder's tensors numbered `part`, `part + of`, ..., or ""."""
    entries = list((read_metadata(folder).storage_data or {}).items())[part::of]
    for index, info in entries:
        path = folder / info.relative_path
        with path.open("rb") as file:
            file.seek(info.offset)
            archive = file.read(info.length)
        bad = _damaged_part(archive)
        if bad is not None:
            return f"{path.name}: {index.fqn!r} is damaged ({bad})"
    return ""


def encode(state: dict[str, Any]) -> bytes:
    """A plain state as bytes that `decode` accepts; NumPy's numbers become Python's.

    Raises:
        TypeError: it holds something that only an unsafe load could read.
    """
    buffer = io.BytesIO()
    torch.save(tree_map_only(np.generic, np.generic.item, state), buffer)
    try:
        decode(buffer.getvalue())
    except pickle.UnpicklingError as error:
        first_line = str(error).strip().partition("\n")[0]
        raise TypeError(
            "expected state of tensors, numbers, strings, lists and dicts, got something that only "
            f"an unsafe load could read; convert it in state_dict(). {first_line}"
        ) from None
    return buffer.getvalue()


def decode(data: bytes) -> dict[str, Any]:
    """The inverse of `encode`; runs no code, whatever the bytes say.

    Raises:
        pickle.UnpicklingError: they are not those that `encode` made.
    """
    bad = _damaged_part(data)
    if bad is not None:
        raise pickle.UnpicklingError(f"expected a state as it was written, {bad} is damaged")
    found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if not isinstance(found, dict):
        raise pickle.UnpicklingError(f"expected a dict, got {type(found)}")
    return found


def _damaged_part(archive: bytes) -> str | None:
    """Return the first damaged member of a ZIP archive; None if its check sums are right."""
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as parts:
            return parts.testzip()
    except (zipfile.BadZipFile, EOFError, NotImplementedError, zlib.error) as error:
        return str(error)


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_metadata(Path(self.path))
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(
                f"refused to load {module}.{name} out of {METADATA}: no part of a checkpoint"
            )
        return super().find_class(module, name)
