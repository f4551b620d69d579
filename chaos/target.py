"""What a run is pointed at: a factory, by name or as it is.

Guarantees: a name that leads nowhere, and what is no factory, is refused before anything starts.

A factory takes no arguments and returns an `Executor`; or a tuple of one and its *traffic*; or a
tuple of anything else that has ``close()`` or ``stop()``, such as a `Supervisor` with executors
under it, and traffic. Traffic is called as ``traffic(handle, chance)``, with the first of the
tuple, again and again, by several threads at once, *chance* being a `random.Random` of the
thread's own; it makes calls, and raises what is wrong with their answers. A `WorkerActor` class is
a factory too, of an executor with two ranks of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from phalanx.actors import Executor, WorkerActor
from phalanx.supervision import SpecError, Supervisor

if TYPE_CHECKING:
    import random

Traffic = Callable[[Any, "random.Random"], object]
DEFAULT_NAME = "chaos"
"""What is looked for in a module where the target names nothing in it."""

_RANKS = 2  # of a worker class that is given by itself
_FORMS = "return an Executor, (Executor, traffic), or (what has close() or stop(), traffic)"


@dataclass(frozen=True, slots=True)
class Subject:
    """What a factory has built.

    Attributes:
        handle: What traffic is given.
        executor: It, where it is an executor.
        traffic: None where the run is to make calls of its own.
    """

    handle: Any
    executor: Executor[Any] | None
    traffic: Traffic | None

    @property
    def is_over(self) -> bool:
        """Whether it has given up; of what is neither an executor nor a supervisor, unknown."""
        if self.executor is not None:
            return self.executor.is_failed
        root: Any = self.handle
        return isinstance(root, Supervisor) and root.reason is not None

    def close(self) -> None:
        """End it."""
        end = _end_of(self.handle)
        assert end is not None
        end()


@dataclass(frozen=True, slots=True)
class Target:
    """A factory and what it is called.

    Attributes:
        home: The folder from which *name* can be imported; empty for where names are looked up
            anyway, None where *name* cannot be imported.
    """

    name: str
    factory: Callable[[], Any]
    home: str | None = ""

    @classmethod
    def of(cls, given: Target | str | Callable[[], Any], *, home: str = "") -> Target:
        """Return the target that is meant by *given*: in a text by a name in *home*.

        Raises:
            SpecError: there is no such thing, or it is no factory.
        """
        if isinstance(given, Target):
            return given
        whence: str | None = home
        factory: Any
        if isinstance(given, str):
            name, factory = given, _find(given, home)
        else:
            factory = given
            name, whence = _address_of(factory)
        if _is_worker_class(factory):
            return cls(name, partial(_executor_of, factory), whence)
        if not callable(factory):
            kind = factory.__class__.__name__
            raise SpecError("target", name, f"is a {kind}, not a factory: {_FORMS} from a function")
        try:
            inspect.signature(factory).bind()
        except TypeError as error:
            raise SpecError("target", name, f"a factory takes no arguments: {error}") from error
        except ValueError:
            pass  # written in C, and does not say what it takes
        return cls(name, factory, whence)

    def build(self) -> Subject:
        """Build it.

        Raises:
            SpecError: what the factory returns is none of what it may.
        """
        try:
            built: Any = self.factory()
        except SystemExit as error:
            remedy = f"ended the program ({error.code}) in place of returning: {_FORMS}"
            raise SpecError("target", self.name, remedy) from error
        kind = built.__class__.__name__
        executor = _as_executor(built)
        if executor is not None:
            return Subject(built, executor, None)
        if _is_pair(built):
            handle, traffic = built
            if callable(traffic) and _end_of(handle) is not None:
                return Subject(handle, _as_executor(handle), traffic)
            built = handle
        end = _end_of(built)
        if end is not None:
            end()
        raise SpecError("target", self.name, f"returned a {kind}: {_FORMS}")


def _is_worker_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, WorkerActor)


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple) and len(cast("tuple[object, ...]", value)) == 2


def _end_of(handle: Any) -> Callable[[], object] | None:
    """Return what ends *handle*, if it can be ended."""
    end: Any = getattr(handle, "close", None) or getattr(handle, "stop", None)
    return end if callable(end) else None


def _as_executor(value: Any) -> Executor[Any] | None:
    executor: Executor[Any] = value
    return executor if isinstance(value, Executor) else None


def _executor_of(worker: type[WorkerActor]) -> Executor[Any]:
    return Executor(worker, _RANKS)


def _address_of(factory: Any) -> tuple[str, str | None]:
    """Return what *factory* is called, and the folder to import that from, if it can be."""
    path = getattr(factory, "__qualname__", None)
    if not isinstance(path, str):
        return repr(factory), None
    module = sys.modules.get(getattr(factory, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if module is None or file is None or module.__name__ == "__main__":
        return path, None
    try:
        if attrgetter(path)(module) is not factory:
            return path, None
    except AttributeError:
        return path, None  # made within a function
    place = Path(file).resolve().with_suffix("")
    words = module.__name__.split(".")
    parts = place.parts[:-1] if place.name == "__init__" else place.parts
    if list(parts[-len(words) :]) != words:
        return path, None  # loaded by a name of somebody's own
    return f"{module.__name__}:{path}", str(Path(*parts[: -len(words)]))


def _find(name: str, home: str) -> Any:
    module, colon, path = name.partition(":")
    if not module or (colon and not path):
        raise SpecError("target", name, "write it as module:factory, or name an example")
    _import_from(Path(home) if home else Path.cwd())
    examples = {} if home else find_examples()
    bare = module.removesuffix(".py")
    example = examples.get(bare.removeprefix("examples."))
    if example is not None:
        module = bare
        if not _is_there(bare, example):
            module = example.stem
            _import_from(example.parent)
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        there = ", ".join(examples) or "none here"
        remedy = f"cannot be imported: {error}; examples: {there}"
        raise SpecError("target", name, remedy) from error
    except (Exception, SystemExit) as error:
        remedy = f"its import raised {type(error).__name__}: {error}"
        raise SpecError("target", name, remedy) from error
    for part in (path or DEFAULT_NAME).split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            remedy = f"{module} has no {path or DEFAULT_NAME!r}; name a factory: module:factory"
            raise SpecError("target", name, remedy) from error
    return found


def _is_there(module: str, example: Path) -> bool:
    """Whether a module of the user's has the name of *example*: then that one is meant."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin != str(example)


def _import_from(folder: Path) -> None:
    """Have *folder* be looked in first."""
    if str(folder) in sys.path:
        sys.path.remove(str(folder))
    sys.path.insert(0, str(folder))


def find_examples() -> dict[str, Path]:
    """Return the examples by name: those of the source tree, else of the current folder."""
    for root in (Path(__file__).resolve().parents[1], Path.cwd()):
        found = {path.stem: path for path in sorted(root.glob("examples/*.py"))}
        if found:
            return found
    return {}
