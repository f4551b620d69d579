"""Worker factory: the class and arguments of a worker object, checked and pickled in the driver.

A factory that has been made is pickled and can be called; no code of the worker has run.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from pathlib import Path
from typing import Any, cast

from phalanx.runtime import encode, encode_by_value
from phalanx.supervision import BadArguments, NotPicklable, RuntimeFault, SpecError

from .worker import HOOKS, WorkerActor

_is_loading: ContextVar[bool] = ContextVar("phalanx_is_loading", default=False)
_NOT_PLAIN = (
    inspect.iscoroutinefunction,
    inspect.isgeneratorfunction,
    inspect.isasyncgenfunction,
)


def check_worker(worker: object) -> type[WorkerActor]:
    """Return *worker* if it is a worker class."""
    given = worker
    if not (isinstance(worker, type) and issubclass(worker, WorkerActor)):
        raise SpecError("worker", given, "give a class derived from phalanx.WorkerActor")
    if worker is WorkerActor or inspect.isabstract(worker):
        raise SpecError("worker", worker, "give a concrete class with methods of its own")
    for hook in sorted(HOOKS):
        if any(is_other(getattr(worker, hook)) for is_other in _NOT_PLAIN):
            text = f"{worker.__qualname__}.{hook} is async or yields; hooks are plain methods"
            raise SpecError("worker", worker, text)
    if inspect.getattr_static(worker, "ctx") is not inspect.getattr_static(WorkerActor, "ctx"):
        text = f"rename {worker.__qualname__}.ctx: phalanx sets that attribute"
        raise SpecError("worker", worker, text)
    return worker


def factory_of(worker: type[WorkerActor], args: object, kwargs: object) -> bytes:
    """Return the pickled class and arguments of one worker object.

    Raises:
        SpecError: *args* are not positional arguments, or *kwargs* not keyword arguments or None.
        NotPicklable: naming the class or the argument that cannot be pickled.
    """
    if not isinstance(args, list | tuple):
        raise SpecError("args", args, "give the constructor's positional arguments as a tuple")
    values = tuple(cast("Sequence[Any]", args))
    named = {} if kwargs is None else keywords("kwargs", kwargs)
    try:
        return encode_by_value((worker, values, named), "the constructor's arguments")
    except NotPicklable:  # only then: an argument may be large, and so its text
        encode_by_value(worker, f"worker={worker!r}")
        for index, value in enumerate(values):
            encode_by_value(value, f"args[{index}]={value!r}")
        for key, value in named.items():
            encode_by_value(value, f"kwargs[{key!r}]={value!r}")
        raise


def load_factory(
    pickled: bytes,
) -> tuple[type[WorkerActor], tuple[Any, ...], Mapping[str, Any]]:
    """Return what `factory_of` has pickled; in a worker, where it imports the class's module."""
    token = _is_loading.set(True)
    try:
        loaded: tuple[type[WorkerActor], tuple[Any, ...], Mapping[str, Any]] = pickle.loads(pickled)
    finally:
        _is_loading.reset(token)
    return loaded


def check_not_loading(worker: type[WorkerActor]) -> None:
    """Raise if an executor of *worker* is built by a module that a worker imports for its class.

    Raises:
        RuntimeFault: else that executor's workers would import the module too, without end.
    """
    if _is_loading.get():
        raise RuntimeFault(
            f"an executor of {worker.__qualname__} is built whenever its module is imported, in "
            "each worker too: put the code that builds it below 'if __name__ == \"__main__\":'"
        )


def keywords_of(
    worker: type[WorkerActor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    own: object,
    rank: int,
) -> bytes:
    """Return the pickled keyword arguments that only *rank* is built with.

    Raises:
        BadArguments: the worker cannot be built with these arguments.
    """
    field = f"launch.rank_kwargs[{rank}]"
    named = keywords(field, own)
    try:
        signature = inspect.signature(worker)
    except (TypeError, ValueError):  # built in C, or by a metaclass: its start finds out
        pass
    else:
        try:
            signature.bind(*args, **{**kwargs, **named})
        except TypeError as error:
            msg = f"{worker.__qualname__}{signature} on rank {rank}: {error}"
            raise BadArguments(msg) from None
    try:
        return encode_by_value(named, field)
    except NotPicklable:  # as above
        for key, value in named.items():
            encode_by_value(value, f"{field}[{key!r}]={value!r}")
        raise


def keywords(field: str, given: object) -> dict[str, Any]:
    """Return *given* if it is a mapping of keyword arguments."""
    named = given
    if not isinstance(named, Mapping) or not all(
        isinstance(key, str) for key in cast("Mapping[object, Any]", named)
    ):
        raise SpecError(field, given, "give a mapping of keyword arguments, named by text")
    return dict(cast("Mapping[str, Any]", named))


def unpicklable_argument(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], error: NotPicklable
) -> NotPicklable:
    """Return *error*, which a call of *name* raised, with the argument that cannot be pickled."""
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


class SourceFile:
    """The file that workers import *worker* from; each start reads it anew.

    Attributes:
        path: Its path; None where the class is pickled by value.
    """

    def __init__(self, worker: type[WorkerActor]) -> None:
        is_named = worker.__module__ != "__main__" and "<locals>" not in worker.__qualname__
        found = getattr(sys.modules.get(worker.__module__), "__file__", None)
        self.path: str | None = found if is_named else None
        self._stamp = self._stat()

    def has_changed(self) -> bool:
        """Whether it differs from the file that the last call of this, or the constructor, saw."""
        before, self._stamp = self._stamp, self._stat()
        return before != self._stamp

    def _stat(self) -> tuple[int, int, int] | None:
        if self.path is None:
            return None
        try:
            known = Path(self.path).stat()
        except OSError:
            return None
        return known.st_ino, known.st_mtime_ns, known.st_size
