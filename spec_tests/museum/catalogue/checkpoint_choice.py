"""Near-misses of loading: another save than the newest, or one that does not fit the model."""

from __future__ import annotations

from spec_tests.museum.card import Source

PLAIN = Source("spec_tests.plain.checkpoint")
LOAD = Source("solution.checkpoint.load")

PLAIN.near_miss(
    "checkpoint.points-by-path",
    "checkpoint.place.any",
    '  temporary.replace(root / f"step-{step}.pt")',
    '+ (root / "latest").write_text(str(root / f"step-{step}.pt"))',
    "...",
    '- found = [p for p in root.glob("step-*.pt") if p.stem.partition("-")[2].isdecimal()]',
    '- return max(found, key=lambda path: int(path.stem.partition("-")[2]), default=None)',
    '+ pointer = root / "latest"',
    "+ return Path(pointer.read_text()) if pointer.exists() else None",
    does="Points to the newest by its absolute path.",
    seen="a `latest` file or link made with the path of the day",
    unseen="Until the run is moved to another disk.",
)

PLAIN.near_miss(
    "checkpoint.newest-as-text",
    "checkpoint.choice.highest-step",
    '- return max(found, key=lambda path: int(path.stem.partition("-")[2]), default=None)',
    "+ return max(found, key=lambda path: path.name, default=None)",
    does="Sorts names: step-9 comes after step-100.",
    seen="max(glob(...)) in many training scripts",
    unseen="Until the step has one digit more.",
)

PLAIN.near_miss(
    "checkpoint.any-word-for-a-number",
    "checkpoint.choice.names-alike",
    '- found = [p for p in root.glob("step-*.pt") if p.stem.partition("-")[2].isdecimal()]',
    '+ found = [p for p in root.glob("step-*.pt")]',
    does="Takes any text after `step-` for a number.",
    seen='`int(path.stem.split("-")[1])` over a glob',
    unseen="Nobody copies a good checkpoint to a name of their own, in a test.",
    outcomes=("failed", "hang"),  # where the first rank alone looks, the others wait for it
)

PLAIN.near_miss(
    "checkpoint.takes-a-backup",
    "checkpoint.choice.backups",
    '- found = [p for p in root.glob("step-*.pt") if p.stem.partition("-")[2].isdecimal()]',
    '- return max(found, key=lambda path: int(path.stem.partition("-")[2]), default=None)',
    '+ found = [p for p in root.glob("step-[0-9]*.pt")]',
    '+ return max(found, key=lambda path: int(path.stem.split("-")[1]), default=None)',
    does="Reads the number after `step-` and ignores the rest of the name.",
    seen="re.match for re.fullmatch",
    unseen="Until somebody puts a save aside under its name and a word.",
)

PLAIN.near_miss(
    "checkpoint.newest-entry",
    "checkpoint.choice.foreign-files",
    '- found = [p for p in root.glob("step-*.pt") if p.stem.partition("-")[2].isdecimal()]',
    '- return max(found, key=lambda path: int(path.stem.partition("-")[2]), default=None)',
    "+ found = list(root.iterdir()) if root.exists() else []",
    "+ return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)",
    does="Takes the entry that was changed last.",
    seen="max(mtime) over the folder",
    unseen="Until somebody leaves a note.",
)

PLAIN.near_miss(
    "checkpoint.none-is-minus-one",
    "checkpoint.choice.none",
    '- raise RuntimeError(f"expected a checkpoint in {directory}, found none")',
    "+ return -1",
    does="Returns -1 where there is nothing to load.",
    seen="a `last_step` that callers add one to",
    unseen="The first run counts from -1 and nobody looks.",
)

LOAD.near_miss(
    "checkpoint.compares-on-its-own",
    "checkpoint.mismatch.on-one-rank",
    '- compared = together(f"load {self.path}", self._compare, self.group)',
    "+ compared = self._compare()",
    does="Finds out on each rank alone whether the model fits.",
    seen="`load_state_dict`, which asks nobody, between two collectives",
    unseen="All ranks build the same model.",
    outcomes=("hang",),
)

PLAIN.near_miss(
    "checkpoint.copies-before-checking",
    "checkpoint.mismatch.changes-nothing",
    '- require_fit(bare(model), state["model"])',
    does="Copies values into the model and then finds that some do not fit.",
    seen="Module.load_state_dict raises after it has copied the tensors that fit",
    unseen="A caller who catches the error trains a mixture.",
)

PLAIN.near_miss(
    "checkpoint.says-not-what",
    "checkpoint.mismatch.names-the-culprit",
    '- raise ValueError(f"the checkpoint does not fit the model: {sorted(wrong)}")',
    '+ raise ValueError("the checkpoint does not fit the model")',
    does="Says that something does not fit, and does not name it.",
    seen="a blanket except around loading",
    unseen="It is an error, as it should be.",
)
