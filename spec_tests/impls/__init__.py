"""What `--impl` takes, and the implementations that this suite has by name.

    solution                    the reference next to this suite, found by location
    torch                       PyTorch's own wrappers (torch.py)
    plain                       the shortest right code (spec_tests/plain)
    package.module              any importable module
    path/to/mine.py             a file; mine.toml beside it holds declared deviations
    path/to/package             a folder with an __init__.py
    cs336:path/to/checkout      CS336 assignment 2, by its tests/adapters.py
    effdl:path/to/fsdp.py       Efficient DL week 5, one file
    course:path/to/checkout     the DDP/FSDP course: data/, model/, train/
    impostor:ID                 a deliberate near-miss out of spec_tests/museum
    accelerate, fabric, ...     a library, by its adapter: the names in LEAGUE

Words are only resolved here, to a `Target`; ranks load it. Each other file is an adapter: it brings
a library, or a course's own layout (its `offer`), to the contract.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path

from spec_tests.rig.target import ADAPTERS, REPOSITORY_ROOT, Target

LEAGUE = {
    "accelerate": ("accelerate", "accelerate"),
    "fabric": ("lightning", "lightning"),
    "fairscale": ("fairscale", "fairscale"),
    "torchtitan": ("torchtitan", "torchtitan"),
    "ignite": ("ignite", "pytorch-ignite"),
    "mmengine": ("mmengine", "mmengine"),
    "torchdata": ("torchdata", "torchdata"),
    "torchtnt": ("torchtnt", "torchtnt"),
    "transformers": ("transformers", "transformers"),
    "xtransformers": ("x_transformers", "x-transformers"),
    "deepspeed": ("deepspeed", "deepspeed"),
    "deepspeed_2": ("deepspeed", "deepspeed"),
}
"""Libraries that have an adapter: the module that it imports, and what pip calls the library.

A colon may stand for the underscore: `deepspeed:2`.
"""
KNOWN_IMPLEMENTATIONS: dict[str, tuple[str, Path | None]] = {
    "torch": ("trainspec_impl_torch", ADAPTERS / "torch.py"),
    "plain": ("spec_tests.plain", None),
    **{name: (f"trainspec_impl_{name}", ADAPTERS / f"{name}.py") for name in LEAGUE},
}
"""Module and file of the implementations in this package; one without a file is imported."""
LAYOUTS = {
    "cs336": ("tests/adapters.py",),
    "effdl": ("fsdp.py", "homework/fsdp.py", "week05_fsdp/homework/fsdp.py"),
    "course": (
        "data/distributed_data_loader.py",
        "model/my_gpt2.py",
        "train/distributed_trainer.py",
    ),
}
"""Layouts of courses, each with files by which one is recognised."""

_MUTANTS = {"torch": "mutant.torch.", "plain": "mutant.spec_tests.plain."}
"""How near-misses begin that are made of other implementations than the reference."""


def parse(spec: str) -> Target:
    """Turn what `--impl` was given into a Target.

    Raises:
        ValueError: if it names no file, no known implementation and no importable module.
    """
    if spec.startswith("impostor:"):
        words = spec.removeprefix("impostor:")
        of = next((n for n, begin in _MUTANTS.items() if words.startswith(begin)), "solution")
        return dataclasses.replace(parse(of), name=spec, impostor=words)
    if spec == "solution":
        return Target(spec, "solution", _solution_folder())
    if spec.replace(":", "_") in LEAGUE:
        spec = spec.replace(":", "_")
    if spec in LEAGUE and not is_installed(spec):
        raise ValueError(f"--impl {spec}: install {LEAGUE[spec][1]}: pip install {LEAGUE[spec][1]}")
    if spec in KNOWN_IMPLEMENTATIONS:
        return Target(spec, *KNOWN_IMPLEMENTATIONS[spec])
    layout, colon, path = spec.partition(":")
    if colon and layout in LAYOUTS:
        return _parse_layout(spec, layout, path)
    if spec.endswith(".py") or "/" in spec or Path(spec).is_dir():
        return _parse_path(spec)
    if spec and all(part.isidentifier() for part in spec.split(".")) and _is_importable(spec):
        return Target(spec, spec)
    raise ValueError(
        f"--impl {spec!r}: expected 'solution', 'torch', 'plain', an "
        "importable module, or a path to a file or package; no such module was found. For a file "
        "give its path with the ending, as in --impl ./mine.py; for a course's layout, "
        f"{', '.join(f'{layout}:PATH' for layout in LAYOUTS)}; for a library, {', '.join(LEAGUE)}"
    )


def is_installed(name: str) -> bool:
    """Return whether the library that the adapter `name` needs can be found; imports nothing."""
    return _is_importable(LEAGUE[name][0])


def _parse_layout(spec: str, layout: str, words: str) -> Target:
    path = Path(words).expanduser().resolve()
    if words and path.is_dir():
        found = _files(layout, path)
        if found:  # a single file, or the folder in which several lie
            file = found[0] if layout == "effdl" else path
            return Target(spec, layout, file, layout=layout, pretends_cuda=True)
    elif path.is_file() and layout == "effdl":
        return Target(spec, layout, path, layout=layout, pretends_cuda=True)
    below = {str(file.relative_to(path).parts[0]) for file in _files(layout, path, "*/")}
    words = "".join(f"; give the folder {each!r} in it" for each in sorted(below))
    raise ValueError(
        f"--impl {spec!r}: expected {layout}:PATH, a folder that holds "
        f"{' or '.join(LAYOUTS[layout])}; found none at {path}{words}"
    )


def _files(layout: str, folder: Path, below: str = "") -> list[Path]:
    """Return the files of a layout that are in a folder, or in the folders `below` it."""
    return [file for name in LAYOUTS[layout] for file in folder.glob(below + name)]


def _parse_path(spec: str) -> Target:
    path = Path(spec).expanduser().resolve()
    if path.is_dir() and (path / "__init__.py").is_file():
        return _package(spec, path)
    if path.is_file() and path.suffix == ".py":
        if path.name == "__init__.py":
            return _package(spec, path.parent)
        # Under a name of its own: ./queue.py must not take the place of the standard library's.
        return Target(spec, f"trainspec_impl_{path.stem}", path)
    found = "a folder without __init__.py" if path.is_dir() else "nothing"
    held = [layout for layout in LAYOUTS if _files(layout, path)]
    words = "".join(f"; for its course's layout give {layout}:{spec}" for layout in held)
    raise ValueError(
        f"--impl {spec!r}: expected a .py file or a package folder, found {found} at {path}{words}"
    )


def _package(spec: str, folder: Path) -> Target:
    """A package keeps its name, since its modules import each other by it."""
    if folder.name in sys.stdlib_module_names:
        raise ValueError(
            f"--impl {spec!r}: a package called {folder.name!r} would take the place of the "
            "standard library's; rename it"
        )
    return Target(spec, folder.name, folder)


def _is_importable(name: str) -> bool:
    # The first part only: to find a.b Python would import a, which is foreign, in this process.
    try:
        return importlib.util.find_spec(name.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False


def _solution_folder() -> Path | None:
    # By location, so that a user's own package called "solution" is no clash. An installed suite
    # without the reference beside it falls back to an import by name.
    folder = REPOSITORY_ROOT / "solution"
    return folder if (folder / "__init__.py").is_file() else None
