"""The target of a run: a factory, by name or as an object.

A factory takes no arguments and returns an `Executor`, or a tuple of a handle and its *traffic*.
The handle is an `Executor` or anything with ``close()`` or ``stop()``, such as a `Supervisor`.
``traffic(handle, chance)`` is called repeatedly by several threads, each with a `random.Random` of
its own; it makes calls, and raises if their results are wrong. A `WorkerActor` class is a factory
of an executor with two ranks.
"""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.actors import Executor, WorkerActor
from phalanx.supervision import SpecError, Supervisor

if TYPE_CHECKING:
    import random

Traffic = Callable[[Any, "random.Random"], object]
DEFAULT_NAME = "chaos"
"""The factory of a target that names only a module."""

_RANKS = 2  # of a worker class
_FORMS = "return an Executor, (Executor, traffic), or (object with close() or stop(), traffic)"


@dataclass(frozen=True, slots=True)
class BuiltTarget:
    """The return value of a factory.

    Attributes:
        handle: The first argument of the traffic.
        executor: The handle, if that is an executor.
        traffic: None for the built-in traffic.
    """

    handle: Any
    executor: Executor[Any] | None
    traffic: Traffic | None

    @property
    def is_over(self) -> bool:
        """Whether the executor or the root supervisor has given up."""
        if self.executor is not None:
            return self.executor.is_failed
        root: Any = self.handle
        return isinstance(root, Supervisor) and root.exit_reason is not None

    def close(self) -> None:
        """Close it."""
        if (end := _end_of(self.handle)) is not None:
            end()


@dataclass(frozen=True, slots=True)
class Target:
    """A factory and its name, ``module:factory``."""

    name: str
    factory: Callable[[], Any]

    @classmethod
    def of(cls, given: Target | str | Callable[[], Any]) -> Target:
        """Return the target *given*; modules of the current folder come first.

        Raises:
            SpecError: it cannot be found, or is no factory.
        """
        if isinstance(given, Target):
            return given
        factory: Any = _find(given) if isinstance(given, str) else given
        name = given if isinstance(given, str) else _name_of(given)
        if inspect.isclass(factory) and issubclass(factory, WorkerActor):
            return cls(name, partial(Executor[Any], factory, _RANKS))
        if not callable(factory):
            kind = factory.__class__.__name__
            raise SpecError("target", name, f"is a {kind}, not a factory: {_FORMS} from a function")
        try:
            inspect.signature(factory).bind()
        except TypeError as error:
            raise SpecError("target", name, f"a factory takes no arguments: {error}") from error
        except ValueError:
            pass  # written in C, without a signature
        return cls(name, factory)

    def build(self) -> BuiltTarget:
        """Call the factory.

        Raises:
            SpecError: it does not return what a factory returns.
        """
        try:
            built: Any = self.factory()
        except SystemExit as error:
            remedy = f"ended the program ({error.code}) instead of returning: {_FORMS}"
            raise SpecError("target", self.name, remedy) from error
        is_pair = built.__class__ is tuple and len(built) == 2
        handle, traffic = built if is_pair else (built, None)
        maybe: Executor[Any] = handle
        found = BuiltTarget(handle, maybe if isinstance(handle, Executor) else None, traffic)
        if callable(traffic) and _end_of(handle) is not None:
            return found
        if found.executor is not None and traffic is None:
            return found
        found.close()
        raise SpecError("target", self.name, f"returned a {built.__class__.__name__}: {_FORMS}")


def _end_of(handle: Any) -> Callable[[], object] | None:
    end: Any = getattr(handle, "close", None) or getattr(handle, "stop", None)
    return end if callable(end) else None


def _name_of(factory: Any) -> str:
    path = getattr(factory, "__qualname__", None)
    return f"{factory.__module__}:{path}" if isinstance(path, str) else repr(factory)


def _find(name: str) -> Any:
    module, colon, path = name.partition(":")
    if not module or (colon and not path):
        raise SpecError("target", name, "write it as module:factory")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    path = path or DEFAULT_NAME
    try:
        return pkgutil.resolve_name(f"{module}:{path}")
    except (Exception, SystemExit) as error:
        why = f"its import raised {type(error).__name__}: {error}"
        if isinstance(error, ImportError | ValueError):
            why = f"cannot be imported: {error}"
        elif isinstance(error, AttributeError) and module in sys.modules:
            why = f"{module} has no {path!r}; name a factory: module:factory"
        raise SpecError("target", name, why) from error
