"""How a rank leaves: by itself, by an exception, or as a fork that is no rank."""

from __future__ import annotations

from typing import Any

from .guard import Current
from .link import error_fields


def raised(hidden: Any, kind: Any, error: Any, trace: Any) -> None:
    """Say that an exception ends this rank, then hand it to the hook that this one hides."""
    link = Current.probe.link if Current.probe is not None else None
    if link is not None:
        link.send_collectives()
        link.send("raised", **error_fields(error, trace))
    hidden(kind, error, trace)


def ended() -> None:
    """Say that this rank ends by itself."""
    link = Current.probe.link if Current.probe is not None else None
    if link is not None and Current.probe is not None:
        link.rest()
        link.send_collectives()
        link.send("end", forwards=len(Current.probe.window.forwards))


def spawned(original: Any, function: Any, *rest: Any) -> Any:
    """Run what `torch.multiprocessing.spawn` starts, whose exceptions reach no hook."""

    def reported(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            raised(lambda *_: None, type(error), error, error.__traceback__)
            raise

    return original(reported, *rest)


def forget() -> None:
    """Stop watching: in a fork of the rank, such as a worker that loads data."""
    probe, Current.probe = Current.probe, None
    if probe is not None and probe.link is not None:
        probe.link.drop()
