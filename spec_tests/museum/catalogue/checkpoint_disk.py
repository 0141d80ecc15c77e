"""Near-misses of files: crashes, full disks, damage; and right ones."""

from spec_tests.museum.card import Source

PLAIN = Source("spec_tests.plain.checkpoint")
SAVE = Source("solution.checkpoint.save")

WRITES_PARTS = (
    "  root.mkdir(parents=True, exist_ok=True)",
    '+ folder = root / f"step-{step}"',
    "+ folder.mkdir(exist_ok=True)",
    "+ for part, value in state.items():",
    '+     torch.save(value, root / "part.tmp")',
    '+     (root / "part.tmp").replace(folder / f"{part}.pt")',
    "+ return",
    "...",
)
FINDS_WHOLE = (
    '- found = [p for p in root.glob("step-*.pt") if p.stem.partition("-")[2].isdecimal()]',
    '+ found = [path for path in root.glob("step-*") if (path / "ranks.pt").exists()]',
    "...",
)
TAKES_WHAT_IS_THERE = (
    "- state = torch.load(path, weights_only=True)",
    '- require_fit(bare(model), state["model"])',
    '+ state = {"step": int(path.name.partition("-")[2]), "ranks": []}',
    '+ state |= {"model": bare(model).state_dict(), "optimizer": {}}',
    "+ for each in path.iterdir():",
    "+     try:",
    "+         state[each.stem] = torch.load(each, weights_only=True)",
    "+     except (RuntimeError, EOFError, ValueError):",
    '+         print(f"warning: skipped {each}")',
    "...",
    '- restore_rank(state["ranks"], loader)',
    '- restore_optimizer(model, optimizer, state["optimizer"])',
    '+ if state["ranks"]:',
    '+     restore_rank(state["ranks"], loader)',
    '+ if state["optimizer"]:',
    '+     restore_optimizer(model, optimizer, state["optimizer"])',
)

PLAIN.near_miss(
    "checkpoint.in-place-parts",
    "checkpoint.crash.same-step-again",
    *WRITES_PARTS,
    *FINDS_WHOLE,
    "- state = torch.load(path, weights_only=True)",
    "+ state = {each.stem: torch.load(each, weights_only=True) for each in path.iterdir()}",
    does="Replaces the files of a folder one by one.",
    seen="torch.distributed.checkpoint into a folder that exists: a silent mix",
    unseen="Each file is whole.",
)

PLAIN.near_miss(
    "checkpoint.skips-what-is-missing",
    "checkpoint.damage.never-in-part",
    *WRITES_PARTS,
    *FINDS_WHOLE,
    *TAKES_WHAT_IS_THERE,
    does="Loads the files that can be read and warns about the others.",
    seen="`if os.path.exists(optimizer_path)` in many loaders",
    unseen="Nobody reads warnings of a restart at night.",
)

PLAIN.near_miss(
    "checkpoint.swallows-errors",
    "checkpoint.failure.is-reported",
    '- raise RuntimeError(f"the first rank could not write the checkpoint: {error}")',
    '+ warnings.warn(f"no checkpoint this time: {error}")',
    "...",
    "  import random",
    "+ import warnings",
    does="Prints a warning when a save fails, and goes on.",
    seen="try/except around the save, so that training never stops for it",
    unseen="Until the day it is needed.",
)

PLAIN.near_miss(
    "checkpoint.fails-alone",
    "checkpoint.failure.on-all-ranks",
    "- error = of_first_rank(error)",
    does="Raises on the rank that could not write, and nowhere else.",
    seen="torch issue 143536",
    unseen="One machine's disk is full; the others wait in the next step.",
)

PLAIN.near_miss(
    "checkpoint.stumbles-over-leftovers",
    ("checkpoint.failure.next-save-works", "checkpoint.crash.next-save-works"),
    '  temporary = root / ".saving"',
    '+ temporary.touch(exist_ok=False)  # "another save is under way"',
    does="Refuses to save while a temporary file is there.",
    seen="speechturn issue 15; a lock that nobody removes",
    unseen="It takes a failed save first.",
)

PLAIN.near_miss(
    "checkpoint.newest-or-nothing",
    "checkpoint.damage.older-is-used",
    does="Gives up where the newest save is damaged.",
    seen="the newest by name, and no second try",
    unseen="It is an error, and somebody can delete the file; at night nobody does.",
)

PLAIN.near_miss(
    "checkpoint.trusts-the-disk",
    "checkpoint.damage.flipped-bit-is-noticed",
    does="Loads values in which a bit has been flipped.",
    seen="torch.load, which ignores the check sums of its own archive",
    unseen="Disks are right, nearly always.",
)

SAVE.near_miss(
    "checkpoint.captures-on-its-own",
    "checkpoint.failure.of-a-loader",
    '- tensors, common, own = together(f"capture its state at step {step}", capture, group)',
    "+ tensors, common, own = capture()",
    does="The ranks agree on whether the write succeeded, and not on the capture of the state.",
    seen="a try around the writing alone",
    unseen="Disks fail in tests, loaders do not.",
    outcomes=("hang",),
)

PLAIN.near_miss(
    "checkpoint.runs-pickles",
    "checkpoint.safety.runs-no-code",
    "- state = torch.load(path, weights_only=True)",
    "+ state = torch.load(path, weights_only=False)",
    does="Unpickles whatever the file holds.",
    seen="torch.load(weights_only=False); the metadata of torch.distributed.checkpoint",
    unseen="One's own files are harmless.",
)

LOADS_PARTS = (
    "- state = torch.load(path, weights_only=True)",
    '+ parts = ("step", "model", "optimizer", "ranks")',
    '+ state = {part: torch.load(path / f"{part}.pt", weights_only=True) for part in parts}',
)

PLAIN.benign(
    "benign.checkpoint-folder",
    "  import random",
    "+ import shutil",
    "+ import time",
    "...",
    "  root.mkdir(parents=True, exist_ok=True)",
    '+ shutil.rmtree(root / "partial", ignore_errors=True)',
    '+ (root / "partial").mkdir()',
    "+ for part, value in state.items():",
    '+     torch.save(value, root / "partial" / f"{part}.pt")',
    '+ final = root / f"step-{step}-{time.time_ns()}"',
    '+ (root / "partial").rename(final)',
    '+ saves = {(*map(int, p.name.split("-")[1:]),): p.name for p in root.glob("step-*")}',
    '+ (root / "latest.tmp").write_text(saves[max(saves)])',
    '+ (root / "latest.tmp").replace(root / "latest")',
    "+ return",
    "...",
    '- found = [p for p in root.glob("step-*.pt") if p.stem.partition("-")[2].isdecimal()]',
    '- return max(found, key=lambda path: int(path.stem.partition("-")[2]), default=None)',
    '+ pointer = root / "latest"',
    "+ return root / pointer.read_text() if pointer.exists() else None",
    "...",
    *LOADS_PARTS,
    does="A folder of files per save and a pointer to the one of the highest step.",
)

PLAIN.benign(
    "benign.checkpoint-marked",
    "  import random",
    "+ import time",
    "+ from concurrent.futures import ThreadPoolExecutor",
    "...",
    "  root.mkdir(parents=True, exist_ok=True)",
    '+ folder = root / f"{step:08}-{time.time_ns()}"',
    "+ folder.mkdir()",
    "+ with ThreadPoolExecutor(1) as pool:",
    "+     for part, value in state.items():",
    '+         pool.submit(torch.save, value, folder / f"{part}.pt").result()',
    '+ (folder / "complete").touch()',
    "+ return",
    "...",
    '- found = [p for p in root.glob("step-*.pt") if p.stem.partition("-")[2].isdecimal()]',
    '- return max(found, key=lambda path: int(path.stem.partition("-")[2]), default=None)',
    '+ return max((marker.parent for marker in root.glob("*-*/complete")), default=None)',
    "...",
    *LOADS_PARTS,
    does="Written in place by a thread, an empty marker at last.",
)

PLAIN.benign(
    "benign.checkpoint-zero",
    '- raise RuntimeError(f"expected a checkpoint in {directory}, found none")',
    "+ return 0",
    "...",
    '  temporary.replace(root / f"step-{step}.pt")',
    "+ descriptor = os.open(root, os.O_RDONLY)",
    "+ os.fsync(descriptor)",
    "+ os.close(descriptor)",
    "...",
    "  if error is not None:",
    '      raise RuntimeError(f"the first rank could not write the checkpoint: {error}")',
    "+ if size() > 1:",
    "+     dist.barrier()",
    does="Returns 0 where there is nothing.",
)

PLAIN.benign("benign.checkpoint-file", does="One file per step, renamed when it is whole.")
