"""`WorkerActor`: the base class of workers, and `method`, which declares options of its methods.

Guarantees: every public method (no leading underscore, not a hook) can be called through the
executor, and no other; the declaration of a method is read once, from the class, in
the driver.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from dataclasses import dataclass, replace
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    cast,
    overload,
)

from phalanx.supervision import BadArguments, SpecError, UnknownMethod, check_seconds

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from concurrent.futures import Future

    from phalanx.supervision import ExitReason

    from .context import WorkerContext

    How = Literal["value", "future", "awaitable"]
    Make = Callable[[How, str, tuple[Any, ...], Mapping[str, Any]], Any]

_P = ParamSpec("_P")
_T = TypeVar("_T")
Reply = Literal["every", "output", "driver"] | int

HOOKS = frozenset(
    {
        *("on_start", "on_stop", "on_failure", "on_reform", "on_standby"),
        *("checkpoint", "restore", "reshard"),
    }
)
_MARK = "__phalanx__"


class _Unset:
    """Stands for `WorkerActor.ctx` until that is set: an attribute of the object hides it."""

    def __get__(self, worker: object, owner: type) -> Self:
        if worker is None:
            return self
        msg = "ctx is set after __init__ has returned: use it in on_start(self, ctx)"
        raise AttributeError(msg)


class WorkerActor:
    """Base class of workers; one instance in each worker process, whose public methods are calls.

    The constructor runs in the worker, with the arguments given to the executor; then `ctx` is
    set and `on_start` runs. One call at a time is served, on the process's main thread.
    """

    ctx: WorkerContext = cast("Any", _Unset())
    """Identity and environment of this worker; set before `on_start`."""

    def on_start(self, ctx: WorkerContext) -> None:
        """Run once per incarnation, before any call; an exception fails the start."""

    def on_standby(self) -> None:
        """Run in a spare process, once, before it has a rank: load what every rank needs.

        There is no `ctx` yet, and no device: only the memory of the host. If a class has this
        hook a spare builds its object before it, so all of its ranks must have the same arguments.
        """

    def on_reform(self, ctx: WorkerContext) -> None:
        """Run on a rank that is kept when another has died: join the epoch in *ctx*.

        phalanx has left the old process group; call ``ctx.init_process_group`` as `on_start`
        did, and keep the rest. An exception ends this rank, and a new one takes its place. Needed
        for ``survivors="keep"``.
        """

    def checkpoint(self) -> Any:
        """Return this worker's state: anything that can be pickled, tensors included.

        Run between calls, when the executor's `CheckpointPolicy` says so; if ranks are formed
        together, on all at the same call: collective operations are allowed. It is stored before
        that call is answered. An exception is reported and costs this snapshot only.
        """
        raise NotImplementedError

    def restore(self, state: Any) -> None:
        """Continue from *state*, which `checkpoint` returned in an earlier incarnation.

        Run after `on_start`, as a part of the start: an exception fails that, and the next
        incarnation is given an older state, if there is one.
        """
        raise NotImplementedError

    def reshard(self, states: Sequence[Any]) -> None:
        """Continue from *states*, one for each of the former ranks, in place of `restore`.

        Run after a change of the number of ranks; for those formed together.
        """
        raise NotImplementedError

    def on_stop(self, reason: ExitReason) -> None:
        """Run when the worker ends in good order, also by SIGTERM or `sys.exit`."""

    def on_failure(self, error: BaseException) -> None:
        """Run when *error* is about to end this worker; its own exceptions are reported only.

        A worker that lives on for longer than a second is killed.
        """


@dataclass(frozen=True, slots=True)
class Declared:
    """The declaration of a method.

    Attributes:
        idempotent: May run twice; makes ``retries=1`` its default.
        reply: The value that `Executor.proxy` returns; None for the default.
        hang_after: Seconds it may run on a rank before that rank counts as hung; None takes
            the executor's, infinity sets no limit.
    """

    idempotent: bool = False
    reply: Reply | None = None
    timeout: float | None = None
    hang_after: float | None = None


@overload
def method(target: Callable[Concatenate[Any, _P], _T], /) -> DeclaredMethod[_P, _T]: ...
@overload
def method(
    *,
    idempotent: bool = False,
    hang_after: float | None = None,
    reply: Reply | None = None,
    timeout: float | None = None,
) -> Callable[[Callable[Concatenate[Any, _P], _T]], DeclaredMethod[_P, _T]]: ...
def method(
    target: Any = None,
    /,
    *,
    idempotent: bool = False,
    hang_after: float | None = None,
    reply: Reply | None = None,
    timeout: float | None = None,
) -> Any:
    """Declare how a method of a worker is called. It stays a plain function.

    Args:
        target: The method, if the decorator stands without arguments.
        idempotent: It may run twice: a death sends the call again by default (``retries=1``).
        hang_after: Seconds it may run on a rank before that rank counts as hung, in place of
            the executor's; ``math.inf`` sets no limit.
        reply: The value that `Executor.proxy` returns: ``"output"``, or None, that of the layout's
            output rank, ``"driver"`` the list of the driver ranks' values, ``"every"`` the list of
            all, or that of one rank.
        timeout: Seconds for the whole call through `Executor.proxy`; None for no limit.
    """
    if reply is not None and (
        isinstance(reply, bool) or not (isinstance(reply, int) or reply in _REPLIES)
    ):
        raise SpecError("reply", reply, f"give a rank or one of {', '.join(_REPLIES)}")
    if timeout is not None:
        check_seconds("timeout", timeout, finite=False)
    if hang_after is not None:
        check_seconds("hang_after", hang_after, positive=True, finite=False)
    options = {"hang_after": hang_after, "reply": reply, "timeout": timeout}
    given: dict[str, Any] = {"idempotent": idempotent or None, **options}

    def mark(target: Any) -> Any:
        function = getattr(target, "__func__", target)  # of a static method
        known: Declared = getattr(function, _MARK, _UNDECLARED)
        new = {name: value for name, value in given.items() if value is not None}
        setattr(function, _MARK, replace(known, **new))
        return target

    return mark if target is None else mark(target)


def _former(name: str, **defaults: Any) -> Any:
    """Return `method` under its former *name*, which is deprecated."""

    def decorate(target: Any = None, /, **given: Any) -> Any:
        mark = method(**{**defaults, **given})
        text = f"phalanx: @{name} is deprecated: write @method(...)"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return mark if target is None else mark(target)

    return decorate


idempotent = _former("idempotent", idempotent=True)
limits = _former("limits")
step = _former("step", reply="output")

_REPLIES = ("every", "output", "driver")
_UNDECLARED = Declared()


def declared_limit(method: Any, otherwise: float | None) -> float | None:
    """Return for how many seconds *method* may run: what it declares, or else *otherwise*."""
    declared: Declared = getattr(method, _MARK, _UNDECLARED)
    return otherwise if declared.hang_after is None else declared.hang_after


@dataclass(frozen=True, slots=True)
class Method:
    """A public method of a worker class, as the driver knows it.

    Attributes:
        least: Positional arguments it needs when no keywords are given; -1 where only a full
            check tells.
        most: Positional arguments it takes; None for any number.
    """

    name: str
    signature: inspect.Signature | None
    least: int
    most: int | None
    declared: Declared

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise `BadArguments` unless the method can be called so."""
        if not kwargs and self.least >= 0:
            count = len(args)
            if count >= self.least and (self.most is None or count <= self.most):
                return
        if self.signature is None:
            return
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            msg = f"{self.name}{self.signature}: {error}"
            raise BadArguments(msg) from None


class Methods:
    """The methods of one worker class, by name."""

    def __init__(self, worker: type[WorkerActor]) -> None:
        self._worker = worker
        self._known: dict[str, Method] = {}
        self._open = hasattr(worker, "__getattr__")

    def find(self, name: str) -> Method:
        """Return the method called *name*.

        Raises:
            UnknownMethod: the class has no such public method.
        """
        method = self._known.get(name)
        if method is None:
            method = self._known[name] = self._look_up(name)
        return method

    def declared_of(
        self,
        method: str | Callable[..., Any],
        each: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]],
    ) -> tuple[str, Declared]:
        """Return the name of *method*, to be called with *each*, and what is declared of it.

        Raises:
            UnknownMethod, BadArguments: it cannot be called so.
            SpecError: it is neither a name nor a callable.
        """
        if isinstance(method, str):
            known = self.find(method)
            for args, kwargs in each:
                known.check(args, kwargs)
            return method, known.declared
        if callable(method):
            return name_of(method), _UNDECLARED
        raise SpecError("method", method, "give a method's name or a callable")

    def declares_reply(self, name: str) -> bool:
        """Whether there is a method *name* that declares the value a proxy returns."""
        method = getattr(self._worker, name, None)
        return _is_public(name) and getattr(method, _MARK, _UNDECLARED).reply is not None

    def _look_up(self, name: str) -> Method:
        value = inspect.getattr_static(self._worker, name, None)
        public = _is_public(name)
        if public and value is None and self._open:
            return Method(name, None, -1, None, _UNDECLARED)
        function = getattr(self._worker, name, None)
        if not public or not callable(function) or isinstance(value, type):
            known = [each for each in dir(self._worker) if _is_public(each)]
            names = [each for each in known if callable(getattr(self._worker, each, None))]
            msg = f"{self._worker.__qualname__} has no method {name!r}; it has {', '.join(names)}"
            raise UnknownMethod(msg)
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            msg = f"{self._worker.__qualname__}.{name} is async; a worker's methods are plain ones"
            raise UnknownMethod(msg)
        declared = getattr(function, _MARK, _UNDECLARED)
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            return Method(name, None, -1, None, declared)
        if hasattr(value, "__get__") and not isinstance(value, staticmethod | classmethod):
            parameters = list(signature.parameters.values())[1:]
            signature = signature.replace(parameters=parameters)
        return Method(name, signature, *_arity(signature), declared)


def name_of(method: str | Callable[..., Any]) -> str:
    """Return the name of calls of *method*; makes no text of what it holds, which may be large."""
    while isinstance(method, functools.partial):
        method = method.func
    if isinstance(method, str):
        return method
    return getattr(method, "__qualname__", None) or type(method).__qualname__


def _is_public(name: str) -> bool:
    return not name.startswith("_") and name not in HOOKS


def _arity(signature: inspect.Signature) -> tuple[int, int | None]:
    least, most, is_open = 0, 0, False
    for parameter in signature.parameters.values():
        match parameter.kind:
            case parameter.POSITIONAL_ONLY | parameter.POSITIONAL_OR_KEYWORD:
                most += 1
                least += parameter.default is parameter.empty
            case parameter.VAR_POSITIONAL:
                is_open = True
            case parameter.KEYWORD_ONLY if parameter.default is parameter.empty:
                return -1, None
            case _:
                pass
    return least, None if is_open else most


class Proxy:
    """Every public method of the worker class, as a `RemoteMethod`: called without strings.

    Prior art: ``ActorProxy`` in Pykka, ``.remote()`` in Ray.

    Args:
        make: Makes a call: given what to return, the method's name and its arguments.
    """

    def __init__(self, make: Make) -> None:
        self._make = make

    def __getattr__(self, name: str) -> RemoteMethod[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return RemoteMethod(self._make, name)


class RemoteMethod(Generic[_P, _T]):
    """One method of a worker class, on the ranks of a `Proxy`. Call it to wait for its value."""

    def __init__(self, make: Make, name: str) -> None:
        self._make = make
        self._name = name

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call the method and return its value."""
        value: _T = self._make("value", self._name, args, kwargs)
        return value

    def future(self, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Call the method and return its `CallFuture`."""
        future: Future[_T] = self._make("future", self._name, args, kwargs)
        return future

    def aio(self, *args: _P.args, **kwargs: _P.kwargs) -> Awaitable[_T]:
        """Call the method and return its value, to be awaited."""
        awaitable: Awaitable[_T] = self._make("awaitable", self._name, args, kwargs)
        return awaitable


class DeclaredMethod(Protocol[_P, _T]):
    """A method declared with `method`, for type checkers: a `RemoteMethod` of a proxy."""

    @overload
    def __get__(self, worker: None, owner: type) -> Callable[Concatenate[Any, _P], _T]: ...
    @overload
    def __get__(self, worker: object, owner: type) -> RemoteMethod[_P, _T]: ...
