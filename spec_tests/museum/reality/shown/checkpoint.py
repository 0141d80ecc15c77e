"""Real bugs of checkpoints: what is not saved or not restored, and what a load picks up."""

from __future__ import annotations

import contextlib
import copy
import io
import random
import shutil
import threading
import time
from typing import Any

import numpy as np
import torch

from spec_tests.museum.reality import faulty, fixed
from spec_tests.plain.checkpoint import PlainCheckpoint, bare, rank, values

# ---------------------------------------------------------------------------- what is restored


@faulty("kempnerforge-115")
class FillsWhatIsThere(PlainCheckpoint):
    """Reads into the entries that the optimizer has: a fresh one has none yet.

    https://github.com/KempnerInstitute/KempnerForge/pull/115
    """

    def restore_optimizer(self, model, optimizer, saved):
        there = {id(p): set(entries) for p, entries in optimizer.state.items()}
        super().restore_optimizer(model, optimizer, saved)
        for parameter, entries in list(optimizer.state.items()):
            for key in set(entries) - there.get(id(parameter), set()):
                del entries[key]


@faulty("maxdiffusion-484")
class LabelsTheStepBefore(PlainCheckpoint):
    """Saves under the index of the iteration, whose update has been made already.

    https://github.com/AI-Hypercomputer/maxdiffusion/pull/484
    """

    def step_to_store(self, step):
        return max(0, step - 1)


@faulty("torchtitan-275")
class KeepsTheFreshRate(PlainCheckpoint):
    """The rate of the updates after a load is where a new schedule begins.

    https://github.com/pytorch/torchtitan/pull/275
    """

    def restore_optimizer(self, model, optimizer, saved):
        rates = [group["lr"] for group in optimizer.param_groups]
        super().restore_optimizer(model, optimizer, saved)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


@faulty("megatron-lm-6858")
class RestoresOneRanksGenerators(PlainCheckpoint):
    """Takes the generators of all ranks for copies of one, and restores that one everywhere.

    https://github.com/NVIDIA/Megatron-LM/pull/6858
    """

    def whose(self, everyone):
        return 0


@faulty("ms-swift-9935")
class SeedsAfterTheLoad(PlainCheckpoint):
    """What is set up after the load begins with a seed.

    https://github.com/modelscope/ms-swift/pull/9935
    """

    def restore_rank(self, everyone, loader):
        super().restore_rank(everyone, loader)
        torch.manual_seed(42)
        np.random.seed(42)
        random.seed(42)


@faulty("relax-317")
class SwallowsTheError(PlainCheckpoint):
    """Reads generators with a reader that refuses NumPy's, below an `except` for old checkpoints.

    https://github.com/redai-studio/Relax/pull/317
    """

    def of_rank(self, model, loader):
        found = super().of_rank(model, loader)
        file = io.BytesIO()
        torch.save({"torch": torch.get_rng_state(), "numpy": np.random.get_state()}, file)
        return {
            **found,
            "generators": torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8),
        }

    def restore_rank(self, everyone, loader):
        own = everyone[self.whose(everyone)]
        if loader is not None:
            loader.load_state_dict(own["loader"])
        with contextlib.suppress(Exception):
            file = io.BytesIO(own["generators"].numpy().tobytes())
            state = torch.load(file, weights_only=True)
            torch.set_rng_state(state["torch"])
            np.random.set_state(state["numpy"])


@faulty("kempnerforge-51")
class NeverAsksTheLoader(PlainCheckpoint):
    """The loop saves model, optimizer and schedule, and forgets to hand in the loader.

    https://github.com/KempnerInstitute/KempnerForge/issues/51
    """

    def save(self, directory, *, step, model, optimizer, loader=None):
        super().save(directory, step=step, model=model, optimizer=optimizer)

    def load(self, directory, *, model, optimizer, loader=None):
        return super().load(directory, model=model, optimizer=optimizer)


@faulty("pytorch-125528")
class RestoresTensorsAlone(PlainCheckpoint):
    """Tensors are written into in place; a number is replaced in a dict that nobody looks at.

    https://github.com/pytorch/pytorch/issues/125528
    """

    def restore_optimizer(self, model, optimizer, saved):
        fresh = [dict(group) for group in optimizer.param_groups]
        super().restore_optimizer(model, optimizer, saved)
        for group, options in zip(optimizer.param_groups, fresh, strict=True):
            for key, value in options.items():
                if key != "params" and not isinstance(group[key], torch.Tensor):
                    group[key] = value


# ------------------------------------------------------------------------- what does not fit


@faulty("kokoro-368")
class PassesOverNames(PlainCheckpoint):
    """Loads the names that fit, and says nothing of the others.

    https://github.com/hexgrad/kokoro/issues/368
    """

    def check(self, module, saved):
        pass

    def restore_model(self, model, saved):
        module = bare(model)
        module.load_state_dict(saved, strict=False)
        for name, buffer in module.named_buffers():
            if name in saved:
                buffer.copy_(saved[name])

    def restore_optimizer(self, model, optimizer, saved):
        names = {id(p): name for name, p in bare(model).named_parameters()}
        known: Any = {name: {"options": {}, "state": {}} for name in names.values()}
        super().restore_optimizer(model, optimizer, {**known, **saved})


@faulty("pytorch-126604")
class ComparesNoShapes(PlainCheckpoint):
    """A tensor takes the part of the saved one that it has room for.

    https://github.com/pytorch/pytorch/issues/126604
    """

    def check(self, module, saved):
        if values(module).keys() != saved.keys():
            raise ValueError("the checkpoint has other names")

    @torch.no_grad()
    def restore_model(self, model, saved):
        for name, tensor in values(bare(model)).items():
            where = tuple(map(slice, map(min, tensor.shape, saved[name].shape)))
            tensor[where].copy_(saved[name][where])


class ComparesDtypes(PlainCheckpoint):
    """Refuses a model of other dtypes, as it refuses other shapes."""

    def check(self, module, saved):
        super().check(module, saved)
        wrong = {name for name, own in values(module).items() if own.dtype != saved[name].dtype}
        if wrong:
            raise ValueError(f"the checkpoint has other dtypes of {sorted(wrong)}")


@faulty("pytorch-187138")
class ComparesNoDtypes(ComparesDtypes):
    """Casts what it loads to the dtype of the model, as copy_ does.

    https://github.com/pytorch/pytorch/issues/187138
    """

    check = PlainCheckpoint.check


# ------------------------------------------------------------------------------ what is on disk

PARTS = ("model", "optimizer", "rest")


def write_parts(folder, state):
    """One file per part, each written in place."""
    folder.mkdir(parents=True, exist_ok=True)
    rest = {key: value for key, value in state.items() if key not in PARTS}
    for name in PARTS:
        with (folder / f"{name}.pt").open("wb") as file:
            torch.save(state.get(name, rest), file)


def read_parts(folder):
    """What is there of them."""
    found: dict[str, Any] = {}
    for name in PARTS:
        path = folder / f"{name}.pt"
        if path.is_file():
            part = torch.load(path, weights_only=True)
            found |= part if name == "rest" else {name: part}
    return found


@faulty("speculators-739")
class NoMarker(PlainCheckpoint):
    """A folder is a save as soon as it exists; parts that are missing keep their fresh values.

    https://github.com/vllm-project/speculators/pull/739
    """

    def put(self, root, step, state):
        write_parts(root / f"step-{step}", state)

    def newest(self, root):
        return max(root.glob("step-*"), key=self.order, default=None)

    def read(self, path):
        return {"step": self.order(path), **read_parts(path)}

    def check(self, module, saved):
        if saved is not None:
            super().check(module, saved)

    def load(self, directory, *, model, optimizer, loader=None):
        path = self.share(self.newest(self.root(directory)) if rank() == 0 else None)
        if path is None:
            return self.none(directory)
        state = self.read(path)
        if "model" in state:
            self.check(bare(model), state["model"])
            self.restore_model(model, state["model"])
        if "optimizer" in state:
            self.restore_optimizer(model, optimizer, state["optimizer"])
        if "ranks" in state:
            self.restore_rank(state["ranks"], loader)
        return state["step"]


@faulty("veomni-1176")
class KeepsTheMarker(PlainCheckpoint):
    """A save of a step that was saved before replaces its parts below the marker of the old one.

    https://github.com/ByteDance-Seed/VeOmni/pull/1176
    """

    def put(self, root, step, state):
        folder = root / f"step-{step}"
        write_parts(folder, state)
        (folder / "complete").touch()

    def newest(self, root):
        found = [marker.parent for marker in root.glob("step-*/complete")]
        return max(found, key=self.order, default=None)

    def read(self, path):
        return read_parts(path)


@faulty("kempnerforge-102")
class MovesThePointerFirst(PlainCheckpoint):
    """Points at the new save and deletes the old ones; then writes the new one.

    https://github.com/KempnerInstitute/KempnerForge/issues/102
    """

    def put(self, root, step, state):
        root.mkdir(parents=True, exist_ok=True)
        (root / "latest").write_text(f"step-{step}")
        for old in root.glob("step-*"):
            shutil.rmtree(old)
        write_parts(root / f"step-{step}", state)

    def newest(self, root):
        pointer = root / "latest"
        return root / pointer.read_text() if pointer.is_file() else None

    def read(self, path):
        return read_parts(path)


class WritesLater(PlainCheckpoint):
    """Returns while a thread writes; the next save or load waits for it."""

    writer: threading.Thread | None = None
    staged: Any

    def put(self, root, step, state):
        self.wait()
        kept = self.staged(state)
        self.writer = threading.Thread(target=self.write, args=(root, step, kept))
        self.writer.start()

    def write(self, root, step, state):
        time.sleep(0.2)  # as long as a step or two
        super().put(root, step, state)

    def wait(self):
        if self.writer is not None:
            self.writer.join()

    def load(self, directory, **objects):
        self.wait()
        return super().load(directory, **objects)


@faulty("tutorials-3688")
class StagesNothing(WritesLater):
    """What the thread writes are the tensors that the next updates change.

    https://github.com/pytorch/tutorials/pull/3688
    """

    def staged(self, state):
        return state


@faulty("nvidia-resiliency-ext-376")
class StagesNoCounters(WritesLater):
    """Copies what lies on a device; counters lie on the host, and are shared with the thread.

    https://github.com/NVIDIA/nvidia-resiliency-ext/pull/376
    """

    def staged(self, state):
        found = copy.deepcopy(state)
        for name, entry in state["optimizer"].items():
            if "step" in entry["state"]:
                found["optimizer"][name]["state"]["step"] = entry["state"]["step"]
        return found


# Nothing that returns before its file is there keeps the contract: these twins write at once.
for _id in ("tutorials-3688", "nvidia-resiliency-ext-376"):
    fixed(_id)(PlainCheckpoint)
