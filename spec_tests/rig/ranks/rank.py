"""The life of one rank: a forked process that answers calls until its parent goes away.

1. Redirect output to a file, so that floods and C++ messages are kept and attached to failures.
2. Start the watcher thread. It answers "what are you doing?" while the main thread is blocked in
   C++, and ends the process when the parent's end of its pipe closes.
3. Import the implementation, put back what that changed, and tell the parent how it went.
4. Take a task, join the process group that the task names, run the body, post the outcome.
5. After a failure, leave the group at once: the peers that wait for this rank are released with
   a transport error and a traceback of where they were.

A body is named, not sent: `(module, qualified name)`. It is called with a `Context` and the
task's arguments, observes, and returns plain data. It never judges.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import gc
import importlib
import multiprocessing
import multiprocessing.process
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from spec_tests.rig.ranks import hygiene, thrift, wire
from spec_tests.rig.ranks.recorder import Recorder
from spec_tests.rig.ranks.watcher import LAST_WORDS, Doing, keep_last_words, watch
from spec_tests.rig.ranks.zygote import forget_triton
from spec_tests.rig.target import Implementation, Target, load

# Longer than any body may take: the parent's clock decides, this one is the last resort.
GROUP_TIMEOUT_S = 120.0
# What a body observes is small; more than this is refused before the parent has to hold it as well.
_MAX_VALUE_BYTES = 64 * 2**20

# Bound before an implementation is imported, which may replace them under their names.
_init_group, _destroy_group = dist.init_process_group, dist.destroy_process_group
_new_group, _barrier, _is_initialized = dist.new_group, dist.barrier, dist.is_initialized


@dataclass(frozen=True)
class RankConfig:
    """What a rank is told once, at its start."""

    rank: int
    world_size: int
    store_port: int
    output_path: str
    scratch: str
    target: Target | None
    transport: str = "gloo"
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """One call: which body, on which group, with what."""

    group: int
    module: str
    qualname: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    seed: int


@dataclass(frozen=True)
class Reply:
    """What a rank answers. `value` is already pickled, so that a bad value is an error there."""

    value: bytes | None
    error: wire.RemoteError | None
    collectives: int
    keeps_groups: bool = False
    leaks: tuple[hygiene.Leak, ...] = ()


class Context:
    """What a body may use: who it is, the implementation under test, a recorder, scratch space.

    Attributes:
        rank, world_size: this rank's number and how many there are.
        device: where tensors of this rank live.
        impl: the implementation; a function that it lacks raises NotOfferedError when called.
        seed: the task's seed; torch, NumPy and random were seeded with `1000 * seed + rank`.
        scratch: a folder that all ranks of this pool share.
        owns_process: whether this process runs this rank only, so that its memory is the rank's.
    """

    owns_process = True

    def __init__(self, config: RankConfig, task: Task, impl: Implementation | None) -> None:
        self.rank = config.rank
        self.world_size = config.world_size
        self.seed = task.seed
        self.scratch = Path(config.scratch)
        self.device = torch.device("cpu")
        if config.transport == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._impl = impl
        self._groups: list[dist.ProcessGroup] = []

    @property
    def impl(self) -> Implementation:
        """The implementation under test."""
        if self._impl is None:
            raise RuntimeError("this world has no implementation: worlds.world(n, target)")
        return self._impl

    def barrier(self) -> None:
        """Wait for all ranks."""
        _barrier()

    def be_late(self, seconds: float) -> None:
        """Let the other ranks get ahead: by this much; simulated ones as far as they can."""
        time.sleep(seconds)

    def was_interrupted(self) -> None:
        """Let end what an interrupted backward has launched, which may write to gradients."""
        time.sleep(0.05)

    @contextlib.contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Record collectives, marks and storage of the body's `with` block."""
        with Recorder() as recorder:
            yield recorder

    def split(self, groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """Cut the world into `groups`; the one this rank is in. All ranks must call it.

        The groups are destroyed when the body ends.
        """
        mine = None
        for ranks in groups:
            group = _new_group(list(ranks))
            if self.rank in ranks:
                mine = group
                self._groups.append(group)
        if mine is None:
            raise ValueError(f"rank {self.rank} is in none of the groups {groups}")
        return mine

    def mesh(
        self,
        sizes: tuple[int, ...],
        names: tuple[str, ...] | None = None,
        *,
        by_column: bool = False,
    ) -> DeviceMesh:
        """A mesh over all ranks. Its groups are destroyed when the body ends.

        Args:
            by_column: neighbours lie in a column, where they ordinarily lie in a row.

        Each thread of gloo looks for work a hundred times a second: forty groups that nobody uses
        any more take a third of two cores.
        """
        if by_column:
            ranks = torch.arange(self.world_size).reshape(sizes[::-1]).T
            mesh = DeviceMesh(self.device.type, ranks.contiguous(), mesh_dim_names=names)
        else:
            mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=names)
        self._groups += [group for group in mesh.get_all_groups() if group != dist.group.WORLD]
        return mesh

    def finish(self) -> None:
        """The body has returned: destroy the groups that `split` and `mesh` made."""
        if self._groups and _is_initialized():
            self.barrier()  # gloo: a peer may not have connected yet, and would be refused
            _forget_meshes()
        while self._groups:
            with contextlib.suppress(ValueError, AssertionError):  # the body did it already
                _destroy_group(self._groups.pop())


@dataclass(frozen=True)
class Greeting:
    """What a rank says once it has imported the implementation, or could not."""

    error: wire.RemoteError | None = None
    offered: tuple[str, ...] = ()
    misfits: dict[str, str] | None = None
    leaks: tuple[str, ...] = ()


def main(config: RankConfig, tasks: Connection, control: Connection) -> None:
    """Serve until the parent ends it. Entry point of the forked process."""
    number = str(config.rank)
    output = begin(config, tasks, control, {"RANK": number, "LOCAL_RANK": number})
    start_watcher(control, config)
    if config.transport == "cuda":
        # Before a mesh does it: that takes the device of number LOCAL_RANK, which may not be there.
        torch.cuda.set_device(config.rank % torch.cuda.device_count())
    keep_last_words(Path(config.output_path).with_suffix(LAST_WORDS))
    store = dist.TCPStore("127.0.0.1", config.store_port, is_master=False)
    impl, greeting = load_implementation(config.target, config.transport)
    _leave()  # the group that the implementation may have joined when it was imported
    greet(tasks, greeting)
    _serve(config, tasks, store, impl, output)


def begin(
    config: RankConfig, tasks: Connection, control: Connection, identity: dict[str, str]
) -> int:
    """Prepare the forked process: output, environment, signals; return the output's descriptor.

    Args:
        identity: variables of the environment that say which rank this is.
    """
    _may_have_children(tasks, control)
    output = _redirect_output(config.output_path)
    had_interpreter = bool(os.environ.get("TRITON_INTERPRET"))  # so the zygote had it as well
    os.environ.update(config.environment)
    if os.environ.get("TRITON_INTERPRET") and not had_interpreter:
        forget_triton()
    os.environ.update(identity, WORLD_SIZE=str(config.world_size))
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    return output


def start_watcher(
    control: Connection, config: RankConfig, answer: Callable[[], Doing] | None = None
) -> None:
    """Have a thread answer who asks what this process does, see `watcher.watch`."""
    told = (control, config.scratch, answer)
    threading.Thread(target=watch, args=told, name="watcher", daemon=True).start()


def greet(tasks: Connection, greeting: Greeting) -> None:
    """Tell the parent how the import went."""
    # Later collections then look at what bodies made, not at torch. Without a collection first:
    # that would take longer than all the rest of the start.
    gc.freeze()
    tasks.send_bytes(wire.dumps(greeting))


def _may_have_children(*pipes: Connection) -> None:
    """Let this process have child processes, such as a loader's workers, that end with it."""
    os.setsid()  # a session of its own: whatever it starts can be ended with it
    # multiprocessing forbids children to daemons; this one is a daemon of the parent alone.
    multiprocessing.process.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # not in stubs
    # Inherited is the fork server that ranks come from: its children would not be this process's.
    # A forked child has the implementation loaded, which no other could import by its name.
    multiprocessing.set_start_method("fork", force=True)
    # A child that held these open would keep the parent from seeing that this rank has died.
    for pipe in pipes:
        os.register_at_fork(after_in_child=pipe.close)


def _redirect_output(path: str) -> int:
    output = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - lives as long as the rank
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - likewise
    faulthandler.enable(sys.stderr)
    return output


def _serve(
    config: RankConfig,
    tasks: Connection,
    store: dist.TCPStore,
    impl: Implementation | None,
    output: int,
) -> None:
    joined, modules = -1, len(sys.modules)
    clean = hygiene.snapshot()
    while True:
        modules = thrift.freeze_imports(modules)
        task: Task = wire.loads(tasks.recv_bytes())
        os.ftruncate(output, 0)
        if task.group != joined:
            _leave()
            _join(config, store, task.group)
            joined = task.group
            clean = hygiene.snapshot()
        reply = _run(task, Context(config, task, impl))
        leaks = hygiene.restore(clean)
        if leaks:  # what could not be put back is the state from now on
            clean = hygiene.snapshot()
        keeps_groups = hygiene.keeps_groups()
        reply = dataclasses.replace(reply, leaks=tuple(leaks), keeps_groups=keeps_groups)
        tasks.send_bytes(wire.dumps(reply))
        if reply.error is not None or reply.collectives < 0:
            _leave()  # releases the peers that wait for this rank
            joined = -1


def _run(task: Task, context: Context) -> Reply:
    try:
        body = _resolve(task.module, task.qualname)
        hygiene.seed_everything(1000 * task.seed + context.rank)
        value = wire.dumps(body(context, *task.args, **task.kwargs))
        context.finish()
        if len(value) > _MAX_VALUE_BYTES:
            raise ValueError(
                f"expected observations of at most {_MAX_VALUE_BYTES >> 20} MB, got "
                f"{len(value) >> 20} MB: the implementation returned far more than it was given"
            )
        return Reply(value, None, _issued_collectives())
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: the rank lives on
        described = wire.RemoteError.of(error, time.monotonic_ns())
        # The frames hold the wrapped model, which holds the group that has to close.
        traceback.clear_frames(error.__traceback__)
        return Reply(None, described, -1)


def _issued_collectives() -> int:
    """How many collectives this rank has issued on the default group; -1 without a group."""
    world = dist.group.WORLD if _is_initialized() else None
    if world is None:
        return -1
    return int(world._get_sequence_number_for_group())  # type: ignore[attr-defined]  # not in stubs


def _forget_meshes() -> None:
    """Clear DTensor's caches of specs: they hold meshes, found by ranks, whose groups are gone."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        clear = getattr(debug, "_clear_sharding_prop_cache", None)  # not public; 2.11 has it, too
        if clear is not None:
            clear()


@functools.cache
def _resolve(module: str, qualname: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def _join(config: RankConfig, store: dist.TCPStore, generation: int) -> None:
    backend = "gloo"
    if config.transport == "cuda" and torch.cuda.device_count() >= config.world_size:
        backend = "cpu:gloo,cuda:nccl"
    elif config.transport == "cuda":
        from spec_tests.rig.ranks.shared_device import avoid_functional_collectives

        avoid_functional_collectives()
    prefixed = dist.PrefixStore(f"rig/{generation}", store)
    _init_group(
        backend,
        store=prefixed,
        rank=config.rank,
        world_size=config.world_size,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
    thrift.let_gloo_give_way()
    # Until all have joined: a rank whose body fails at once would otherwise close its sockets
    # while a slower peer still connects, and that peer would die of it.
    if prefixed.add("joined", 1) == config.world_size:
        prefixed.set("all joined", "")
    prefixed.wait(["all joined"])


def _leave() -> None:
    if _is_initialized():
        gc.collect()  # a wrapped model that nobody holds any more still holds the group
        with contextlib.suppress(RuntimeError):  # a broken group may refuse to shut down
            _destroy_group()


# ------------------------------------------------------------------------ the implementation


def load_implementation(
    target: Target | None, transport: str
) -> tuple[Implementation | None, Greeting]:
    """Return the implementation and the greeting; None without one or if its import failed."""
    if target is None:
        return None, Greeting()
    thrift.spare_the_machine()
    device = prepare_device(target, transport)
    clean, whole = hygiene.snapshot(), hygiene.attributes()
    try:
        impl = load(target, device=device)
        error = None
    except BaseException as caught:  # SystemExit and KeyboardInterrupt too
        begun = None if target.impostor is not None else _theirs(caught.__traceback__)
        if begun is not None or isinstance(caught, SyntaxError):
            caught = caught.with_traceback(begun)
        impl, error = None, wire.RemoteError.of(caught, time.monotonic_ns())
    leaks = [str(leak) for leak in hygiene.restore(clean) if not leak.is_harmless]
    leaks += [f"replaced {name}" for name in hygiene.replaced(whole)]
    if impl is None:
        return None, Greeting(error, leaks=tuple(leaks))
    return impl, Greeting(None, impl.offered, impl.misfits, tuple(leaks))


def prepare_device(target: Target, transport: str) -> str:
    """The type of the device that the implementation finds here, a stand-in if need be."""
    if target.pretends_cuda and transport != "cuda":
        # Imported here: the other ranks have no use for it.
        from spec_tests.rig.ranks import pretended_cuda

        pretended_cuda.install()
        return "cuda"
    return "cuda" if transport == "cuda" else "cpu"


def _theirs(trace: TracebackType | None) -> TracebackType | None:
    """From the first frame on that is neither the suite's nor importlib's; None without one."""
    suite = str(Path(__file__).parents[2])
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith((suite, "<frozen importlib")):
            return trace
        trace = trace.tb_next
    return None
