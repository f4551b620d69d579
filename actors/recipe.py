"""How the worker object of each rank is built: checked, and pickled, in the driver.

Guarantees: a recipe that exists can be called, and has been pickled; nothing of the worker has run.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

from phalanx.runtime import encode, encode_by_value
from phalanx.supervision import BadArguments, NotPicklable, SpecError

from .worker import HOOKS, WorkerActor


def check_worker(worker: object) -> type[WorkerActor]:
    """Return *worker* if it is a worker class."""
    given = worker
    if not (isinstance(worker, type) and issubclass(worker, WorkerActor)):
        raise SpecError("worker", given, "give a class derived from phalanx.WorkerActor")
    if worker is WorkerActor or inspect.isabstract(worker):
        raise SpecError("worker", worker, "give a concrete class with methods of its own")
    for hook in sorted(HOOKS):
        if inspect.iscoroutinefunction(getattr(worker, hook)):
            text = f"{worker.__qualname__}.{hook} is async; a worker's hooks are plain methods"
            raise SpecError("worker", worker, text)
    if inspect.getattr_static(worker, "ctx") is not inspect.getattr_static(WorkerActor, "ctx"):
        text = f"rename {worker.__qualname__}.ctx: phalanx sets that attribute"
        raise SpecError("worker", worker, text)
    return worker


def check_arguments(args: object, kwargs: object) -> None:
    """Raise unless *args* are positional arguments, and *kwargs* is None or keyword arguments."""
    if not isinstance(args, list | tuple):
        raise SpecError("args", args, "give the constructor's positional arguments as a tuple")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise SpecError("kwargs", kwargs, "give the constructor's keyword arguments as a mapping")
    named = cast("Mapping[object, Any]", kwargs or {})
    if not all(isinstance(key, str) for key in named):
        raise SpecError("kwargs", named, "name the constructor's arguments by text")


def check_constructor(
    worker: type[WorkerActor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    own: object,
    rank: int,
) -> None:
    """Raise `BadArguments` unless the worker can be built so on *rank*."""
    named = {**kwargs, **_named(own, rank)}
    try:
        signature = inspect.signature(worker)
    except (TypeError, ValueError):  # built in C, or by a metaclass: the worker will tell
        return
    try:
        signature.bind(*args, **named)
    except TypeError as error:
        msg = f"{worker.__qualname__}{signature} on rank {rank}: {error}"
        raise BadArguments(msg) from None


def factory_of(
    worker: type[WorkerActor], args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> bytes:
    """Return the pickled recipe for one worker object.

    Raises:
        NotPicklable: naming the class or the argument that cannot travel.
    """
    encode_by_value(worker, f"worker={worker!r}")
    for index, value in enumerate(args):
        encode_by_value(value, f"args[{index}]={value!r}")
    for key, value in (kwargs or {}).items():
        encode_by_value(value, f"kwargs[{key!r}]={value!r}")
    return encode_by_value((worker, tuple(args), dict(kwargs or {})), "the constructor's arguments")


def culprit(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], error: NotPicklable
) -> NotPicklable:
    """Return *error*, why a call of *name* cannot travel, with the argument that is to blame."""
    named = {f"args[{index}]": value for index, value in enumerate(args)}
    named |= {f"kwargs[{key!r}]": value for key, value in kwargs.items()}
    for field, value in named.items():
        if isinstance(value, Future | asyncio.Future):
            return NotPicklable(f"{field} of {name} is a future: pass its result()")
        try:
            encode(value, f"{field}={value!r} of {name}")
        except NotPicklable as own:
            return own
    return error


class Source:
    """The file that workers import *worker* from, where they do: each start reads it anew.

    Attributes:
        file: Its path; None where the class travels by value.
    """

    def __init__(self, worker: type[WorkerActor]) -> None:
        is_named = worker.__module__ != "__main__" and "<locals>" not in worker.__qualname__
        found = getattr(sys.modules.get(worker.__module__), "__file__", None)
        self.file: str | None = found if is_named else None
        self._stamp = self._look()

    def has_changed(self) -> bool:
        """Whether it is another than when this was asked last, or than at first."""
        before, self._stamp = self._stamp, self._look()
        return before != self._stamp

    def _look(self) -> tuple[int, int, int] | None:
        if self.file is None:
            return None
        try:
            known = Path(self.file).stat()
        except OSError:
            return None
        return known.st_ino, known.st_mtime_ns, known.st_size


def keywords_of(rank: int, own: object) -> bytes:
    """Return the pickled keyword arguments that *rank* has of its own."""
    return encode_by_value(_named(own, rank), f"rank_kwargs[{rank}]={own!r}")


def _named(own: object, rank: int) -> dict[str, Any]:
    if not isinstance(own, Mapping):
        raise SpecError(f"rank_kwargs[{rank}]", own, "give a mapping of keyword arguments")
    named = dict(cast("Mapping[object, Any]", own))
    if not all(isinstance(key, str) for key in named):
        raise SpecError(f"rank_kwargs[{rank}]", named, "name the arguments by text")
    return cast("dict[str, Any]", named)
