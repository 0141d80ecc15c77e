"""What a rank's own process sees: forwards, backwards, optimizer steps, clipping, losses.

Everything is observed by hooks that torch offers for all modules and all optimizers, and by
wrapping the functions that `calls.start` lists. No hook is left on a module of the script, which
may be copied or pickled. Nothing here raises into the script, draws a random number, or
communicates through its groups; under `torch.compile` a hook returns at once.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import os
import sys
import time
import traceback
import warnings
import weakref
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import optimizer as optim

from . import calls, loading
from .guard import Current, is_inside, observe, probe_to_ask, quiet, watch_this_thread, watching
from .layout import (
    Names,
    fingerprint,
    full_weights,
    is_dtensor,
    local_of,
    norms_of,
    not_finite,
    own_part,
)
from .link import Link, collectives_so_far, ended, forget, raised, script_line, spawned
from .replay import Recording, finish
from .window import (
    EARLY,
    Sample,
    Watched,
    Window,
    numbers,
    options_of,
    plain,
    random_now,
    tensors_of,
)

_WATCHED = "TRAINSPEC_WATCHED"  # the process of this rank: what it starts is not watched


def start() -> None:
    """Install the probe in this process; the start-up hook calls it behind `import torch`."""
    if os.environ.get(_WATCHED, str(os.getpid())) != str(os.getpid()):
        return  # a program that a rank has started, such as a compiler's worker
    Current.probe = Probe(json.loads(os.environ["TRAINSPEC_WATCH"]))
    watch_this_thread()  # that has imported torch; the script's others are not watched
    modules, registered = nn.modules.module, quiet(lambda probe, *of: probe.names.register(*of))
    modules.register_module_parameter_registration_hook(registered)
    wrapped_by_ddp = quiet(lambda probe, module, *_: probe.names.register_module(module))
    modules.register_module_module_registration_hook(wrapped_by_ddp)
    modules.register_module_forward_pre_hook(_before_forward)
    modules.register_module_forward_hook(_after_forward, always_call=True)
    optim.register_optimizer_step_pre_hook(quiet(Probe.before_step))
    optim.register_optimizer_step_post_hook(quiet(Probe.after_step))
    warnings.filterwarnings("ignore", message=".*when there are global hooks on modules.*")
    calls.start()
    loading.start(Current.probe.options["scratch"])
    spawn: Any = sys.modules.get("torch.multiprocessing.spawn")
    if spawn is not None:  # a function: it is pickled by name
        observe("_wrap", spawn, around=spawned, is_watched=watching)
    os.register_at_fork(after_in_child=forget)
    atexit.register(ended)
    sys.excepthook = functools.partial(raised, sys.excepthook)
    process = sys.modules.get("multiprocessing.process")
    is_child = process is not None and process.parent_process() is not None
    if "RANK" in os.environ and "LOCAL_RANK" in os.environ and not is_child:
        Current.probe.connect()


class Probe:
    """What is known of this rank's training, and its link to the agent."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.link: Link | None = None
        self.names = Names()
        self.root: nn.Module | None = None
        self.inner: nn.Module | None = None  # of DDP: what the root hands on to
        self.trains = False  # the forward that is running
        self.talked = 0  # collectives before the forward that is running
        self.takes_gradients = True
        self.built: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers, before they step too
        self.optimizers: WeakKeyDictionary[Any, Watched] = WeakKeyDictionary()
        self._numbers = itertools.count()  # of optimizers, in the order of their first steps
        self.stepping: int | None = None
        self.recordings: WeakKeyDictionary[nn.Module, Recording] = WeakKeyDictionary()
        self.has_scaler = False
        self.scaled: set[int] = set()  # scalers that scaled a loss in this window
        self.clips: list[dict[str, Any]] = []
        self.factors: dict[int, float] = {}  # what clipping has multiplied each gradient by
        self.window = Window()
        self.feeds = loading.Feeds()
        self.loaded: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self.compared: set[tuple[int, str]] = set()
        self._roots: WeakKeyDictionary[nn.Module, tuple[Any, Any]] = WeakKeyDictionary()
        self._world: tuple[int, int] | None = None
        self._failures = 0

    def connect(self) -> Link:
        """Open the link, and say which rank this is as soon as that is known."""
        if self.link is None:
            self.link = Link(self.options["agent"])
            os.environ[_WATCHED] = str(os.getpid())
            self.link.send("rank", rank=int(os.environ.get("RANK", 0)), world=None)
        world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
        if world is not None and world != self._world:
            self._world = world
            self._move_to_first_agent(*world)
            if "gloo" in str(dist.get_backend()):
                # With NCCL, its own watchdog may abort while Python's lock is held.
                self.link.keep_last_words()
            self.link.send("rank", rank=world[0], world=world[1])
        return self.link

    def _move_to_first_agent(self, rank: int, size: int) -> None:
        """Where ranks live on several nodes, each with an agent, talk to that of rank 0."""
        assert self.link is not None
        if int(os.environ.get("LOCAL_WORLD_SIZE", size)) == size:
            return
        store = dist.PrefixStore("trainspec-watch", dist.distributed_c10d._get_default_store())
        if rank == 0:
            store.set("agent", self.options["agent"])
            return
        store.wait(["agent"], timedelta(seconds=20))
        address = store.get("agent").decode()
        if address != self.options["agent"]:
            self.link.send("moved", to=address.rpartition(":")[0])
            self.link.drop()
            self.link = Link(address)

    def fail(self, error: Exception) -> None:
        """Say that a hook failed; after three times the probe gives up."""
        self._failures += 1
        if self.link is not None:
            where = "".join(traceback.format_exception(error)[-2:])[-400:]
            self.link.send("note", text=f"a hook of the watcher failed: {where}")
        if self._failures >= 3:
            ended()
            forget()

    def begin(self, module: nn.Module, arguments: tuple[Any, ...], keywords: Any) -> None:
        """A module is called at the top: take its inputs, if it trains."""
        parameters = list(module.parameters())
        if not parameters or isinstance(module, torch.fx.GraphModule):  # a loss; compiled in place
            return
        if any(p.is_meta for p in parameters):
            return
        seen = tuple((id(p), p.requires_grad) for p in parameters)
        known, last = self._roots.get(module, ((), None))
        if known != seen:
            if last is not None:
                last.detach()
            last = weakref.finalize(module, quiet(Probe.gone), [*map(self.names.of, parameters)])
            self._roots[module] = seen, last
            self.names.learn(module)
            self._count_backwards(parameters)
        self.root = module
        self.inner = getattr(self.names.wrapper(module), "module", module)
        self.trains = False
        self.window.called.add(module)
        ids = {id(p) for p in parameters}
        held = [each.ids for each in self.optimizers.values()]
        if not (module.training and self.takes_gradients and any(flag for _, flag in seen)):
            # An evaluation has taken the batch; what no optimizer holds hands it on, as an encoder.
            if any(flag for _, flag in seen) and (not held or any(ids & each for each in held)):
                self.feeds.current = None
            return
        link = self.connect()
        if all(each.steps < 3 for each in self.optimizers.values()):
            link.send_collectives()  # a rank that is about to abort has no time to
        self.window.forward(module, tensors_of((arguments, keywords or {})), self.names)
        self.window.feed = self.feeds.train() or self.window.feed
        self.trains = True
        taken = [each.steps for each in self.optimizers.values() if ids & each.ids]
        if self.options["replay"] in [steps + 1 for steps in taken or [0]]:
            if module not in self.recordings:
                self.recordings[module] = Recording(self.names)
            self.recordings[module].begin(module, arguments, keywords or {})

    def _count_backwards(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            known = self.names.of(parameter)
            if not parameter.requires_grad or known.is_counted or is_dtensor(parameter):
                continue
            if parameter.is_leaf and not known.is_fsdp:
                known.is_counted = True
                parameter.register_post_accumulate_grad_hook(_accumulated)

    def enter(self, module: nn.Module) -> None:
        """A module is about to compute, below the top or at it."""
        if module is self.inner:
            self.window.take_buffers(module)
            self.talked = collectives_so_far()
        self.compare_and_keep(module)

    def compare_and_keep(self, module: nn.Module) -> None:
        """Look at the full weights that a module computes with."""
        if self.names.shards:
            self._compare_shards(module)
        recording = None if self.root is None else self.recordings.get(self.root)
        if recording is not None:
            recording.enter(module)

    def _compare_shards(self, module: nn.Module) -> None:
        """Are the full weights that it computes with the current shards? Once per step each."""
        for owner, name, parameter in full_weights(module):
            key = (id(owner), name)
            known = self.names.shards.get(key)
            shard = None if known is None or key in self.compared else known[1]()
            own = None if shard is None else own_part(parameter.detach(), shard)
            if known is None or shard is None or own is None:
                continue
            self.compared.add(key)
            self.window.is_low |= own.element_size() < 4
            local = local_of(shard).to(own.dtype)
            both_nan = own.isnan() & local.isnan()
            differs = ((own != local) & ~both_nan).sum(dtype=torch.int64)
            self.window.stale.append((known[0], script_line(), differs))

    def gone(self, known: list[Any]) -> None:
        """A model goes, at the latest with the process: say what its weights have become."""
        if self.link is not None:  # None of a weight that a garbage collection has taken before
            last = [None if (p := k.parameter()) is None else fingerprint(p) for k in known]
            self.link.send("gone", numbers=[k.number for k in known], weights=plain(last))

    def cleared(self, parameters: Iterable[Tensor]) -> None:
        """Gradients were cleared: what came before does not go into the step."""
        ids = {id(p) for p in parameters}
        self.window.cleared(ids)
        self.clips = [clip for clip in self.clips if id(clip["largest"]) not in ids]
        self.factors = {key: of for key, of in self.factors.items() if key not in ids}
        for model, recording in self.recordings.items():
            if any(id(p) in ids for p in model.parameters()):
                recording.cleared()

    def models_of(self, watched: Watched) -> list[nn.Module]:
        """Return the recorded models that have parameters of an optimizer."""
        return [m for m in self.recordings if any(id(p) in watched.ids for p in m.parameters())]

    def replay(self, watched: Watched) -> dict[str, Any] | None:
        """Compute the gradients of a step again, if it is the one that was asked for."""
        if watched.steps + 1 != self.options["replay"]:
            return None
        recordings = {model: self.recordings[model] for model in self.models_of(watched)}
        self._forget(watched)
        rank = dist.get_rank() if dist.is_initialized() else 0
        path = Path(self.options["scratch"]) / f"optimizer{watched.number}-rank{rank}.pt"
        if not recordings:
            return {"reason": "no forward was seen of a model whose parameters it holds"}
        return finish(recordings, watched, path)

    def _forget(self, watched: Watched) -> None:
        """Drop the recordings of an optimizer's models, but for what another one asks for yet."""
        others = [w for w in self.optimizers.values() if w is not watched]
        coming = [w.ids for w in others if w.steps < self.options["replay"]]
        for model in self.models_of(watched):
            if not any(id(p) in ids for p in model.parameters() for ids in coming):
                del self.recordings[model]

    def loose(self, stepped: Watched) -> list[list[str]]:
        """Return names of parameters: with gradients that no optimizer steps; held, of no module.

        Third: of the first list, those whose optimizer has not stepped for long. Fourth: those of
        `stepped` with gradients that FSDP2 has accumulated and not reduced.
        """
        held = set().union(*(each.ids for each in self.optimizers.values()))
        built = {id(p) for each in self.built for g in each.param_groups for p in g["params"]}
        held |= built if stepped.steps < EARLY else set()
        loose = [
            (key, k)
            for key, k in [*self.names.known.items()]
            if key not in held and k.owner() and (p := k.parameter()) is not None
            if p.requires_grad and p.grad is not None
        ]
        stray = [
            entry.name
            for each in self.optimizers.values()
            for entry, p in zip(each.entries, each.parameters, strict=True)
            if not entry.is_held and entry.is_trained and p.grad is None
        ]
        idle = [k.name for key, k in loose if key in built]
        return [[k.name for _, k in loose], stray, idle, self.names.unreduced(stepped.ids)]

    def left(self, module: nn.Module, output: Any) -> None:
        """The forward at the top has ended."""
        if self.trains and self.window.forwards:  # none if an optimizer has stepped in it
            forward = self.window.forwards[-1]
            forward["drops"] |= forward["random"] != random_now()
            forward["talks"] = collectives_so_far() != self.talked and not self.names.talks(module)
        self.root = self.inner = None
        recording = self.recordings.get(module)
        if recording is not None:
            recording.leave(output)

    def accumulated(self, parameter: Tensor) -> None:
        """A backward has added to the gradient of a parameter."""
        ddp = self.names.of(parameter).ddp
        is_unsynced = ddp is not None and not ddp.require_backward_grad_sync
        is_synced = ddp is not None and not is_unsynced and not ddp._comm_hooks
        self.window.accumulated(parameter, is_unsynced, is_synced)
        calls.made(self, parameter)
        for recording in self.recordings.values():
            recording.accumulated()

    def before_step(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        """An optimizer is about to step: take what it is given."""
        if self.stepping not in (None, id(optimizer)) and is_inside(self.stepping):
            return  # a wrapper's inner optimizer
        self.stepping = id(optimizer)
        if any(p.is_meta for group in optimizer.param_groups for p in group["params"]):
            return
        link, groups = self.connect(), optimizer.param_groups
        if optimizer not in self.optimizers:
            self.optimizers[optimizer] = Watched(next(self._numbers))
        watched = self.optimizers[optimizer]
        if watched.describe(groups, self.names):
            link.send("layout", optimizer=watched.number, entries=list(map(vars, watched.entries)))
        grads = [p.grad for p in watched.parameters]
        norms, watched.event = norms_of(grads), {}
        bad_names = not_finite(watched.entries, grads, norms)
        event = {
            "optimizer": watched.number,
            "title": type(optimizer).__name__,
            "step": watched.steps + 1,
            "place": script_line(),
            "options": options_of(groups),
            "loaded": self.loaded.pop(optimizer, None),
            "grads": [None if g is None else fingerprint(g) for g in grads],
            "before": watched.before(),
            "norms": [None if g is None else n for g, n in zip(grads, norms, strict=True)],
            "weights": [] if watched.steps else norms_of([*watched.parameters]),
            "bad": {"grads": bad_names, "before": watched.not_finite() if bad_names else []},
            "reduces": self.window.reduces(watched.parameters),
            "sums": calls.norm_of_sums(self.window, watched.parameters),
            "clip": calls.norm_again(self, watched.parameters),
            "skips": getattr(optimizer, "found_inf", None) is not None,
            "loose": self.loose(watched) if watched.steps else [[], [], [], []],
            "ties": self.names.broken_ties(),
            "messages": link.has_messages,
            "joined": calls.is_for_join(sys._getframe(1)),
            "scaled": bool(self.scaled) and getattr(optimizer, "grad_scale", None) is None,
            "scale": calls.loss_scale(sys._getframe(1)) if self.has_scaler else 1.0,
        }
        self.scaled.clear()
        event |= self.window.fields() | {"others": calls.others(self)}
        event["feed"] = loading.fields(self.window.feed)
        event["unheld"] = self.window.unheld(self.names, self.optimizers.values(), watched.steps)
        event = plain(event)
        before, watched.last = watched.last, event["before"]
        watched.is_written = before not in ([], watched.last)
        watched.factors = [self.factors.pop(id(p), 1) / event["scale"] for p in watched.parameters]
        event["replay"] = self.replay(watched)
        watched.usual, self.window = len(self.window.forwards), Window()
        self._keep(watched, optimizer, [*arguments[1:], *keywords.values()])
        event["begun"] = time.time_ns()
        watched.event = event

    def _keep(self, watched: Watched, optimizer: Any, given: list[Any]) -> None:
        """Keep what goes into the second step, and the gradients of the one before the replayed.

        Args:
            given: to the step; a closure makes gradients in it.
        """
        watched.take_half()
        is_sampled = watched.steps == 1 and all(each is None for each in given)
        watched.sample = Sample(optimizer, self.names) if is_sampled else None
        if watched.steps + 2 == self.options["replay"]:
            pairs = [(id(p), p.grad) for p in watched.parameters if p.grad is not None]
            watched.earlier = {key: local_of(grad).clone() for key, grad in pairs}

    def after_step(self, optimizer: Any, *arguments: Any) -> None:
        """An optimizer has stepped: look at what became of its parameters, and send the step."""
        watched = self.optimizers.get(optimizer)
        if watched is None or self.stepping != id(optimizer):
            return
        self.stepping = None
        if not watched.event:
            return
        watched.steps += 1
        if watched.steps == self.options["replay"]:
            watched.earlier = {}
            self._forget(watched)  # LBFGS makes them within the step
        for recording in self.recordings.values():
            recording.stepped()
        after = numbers([fingerprint(p) for p in watched.parameters])
        moved = sum(a != b for a, b in zip(after, watched.last, strict=True))
        watched.last = after
        watched.event["half"] = watched.compare_half()
        watched.event["update"] = watched.sample and watched.sample.compare()
        bad = watched.event["bad"]
        bad["after"] = watched.not_finite() if bad["grads"] else []
        link = self.connect()
        link.send_collectives(unless_recent=watched.steps > 3 and not watched.is_written)
        link.send("step", **watched.event, after=after, moved=moved, met=self.names.met)
        self.compared.clear()
        if watched.steps == self.options["steps"]:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            link.end_rank()


def _before_forward(module: nn.Module, arguments: tuple[Any, ...]) -> None:
    probe: Probe | None = probe_to_ask()
    if probe is None:
        return
    probe.takes_gradients = torch.is_grad_enabled()
    # Within a backward, activation checkpointing calls modules again.
    if probe.root is None and torch._C._current_graph_task_id() == -1:
        # A hook for all modules is not given the keywords; only the inputs of the model are needed.
        _begin(module, arguments, sys._getframe(1).f_locals.get("kwargs"))
    if probe.root is not None and (probe.names.shards or probe.recordings or module is probe.inner):
        _enter(module)


def _after_forward(module: nn.Module, arguments: Any, output: Any) -> None:
    probe: Probe | None = probe_to_ask()
    if probe is None:
        return
    # Hooks for all modules come before those of the module itself: a unit of FSDP2 has its full
    # weights when its forward ends, and not when it begins.
    if probe.root is not None and id(module) in probe.names.units:
        _compare_and_keep(module)
    if module is probe.root:
        _leave(module, output)


_begin, _enter, _leave = quiet(Probe.begin), quiet(Probe.enter), quiet(Probe.left)
_compare_and_keep = quiet(Probe.compare_and_keep)
# In any thread, of parameters of forwards that were seen: each GPU has a thread for its own ones.
_accumulated = quiet(Probe.accumulated, elsewhere=True)
