"""`Proxy`: the methods of a worker class, called on its ranks without naming them in strings.

Prior art: ``ActorProxy`` in Pykka, ``.remote()`` in Ray.
"""

from __future__ import annotations

from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    TypeVar,
    overload,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from concurrent.futures import Future

    How = Literal["value", "future", "awaitable"]
    Make = Callable[[How, str, tuple[Any, ...], Mapping[str, Any]], Any]

P = ParamSpec("P")
T = TypeVar("T")


class Proxy:
    """Every public method of the worker class, as a `RemoteMethod`.

    Args:
        make: Makes a call: given what to return, the method's name and its arguments.
    """

    def __init__(self, make: Make) -> None:
        self._make = make

    def __getattr__(self, name: str) -> RemoteMethod[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return RemoteMethod(self._make, name)


class RemoteMethod(Generic[P, T]):
    """One method of a worker class, on the ranks of a `Proxy`. Call it to wait for its value."""

    def __init__(self, make: Make, name: str) -> None:
        self._make = make
        self._name = name

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the method and return its value."""
        value: T = self._make("value", self._name, args, kwargs)
        return value

    def future(self, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call the method and return its `CallFuture`."""
        future: Future[T] = self._make("future", self._name, args, kwargs)
        return future

    def aio(self, *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]:
        """Call the method and return its value, to be awaited."""
        awaitable: Awaitable[T] = self._make("awaitable", self._name, args, kwargs)
        return awaitable


class DeclaredMethod(Protocol[P, T]):
    """A method declared with `method`, for type checkers: a `RemoteMethod` of a proxy."""

    @overload
    def __get__(self, worker: None, owner: type) -> Callable[Concatenate[Any, P], T]: ...
    @overload
    def __get__(self, worker: object, owner: type) -> RemoteMethod[P, T]: ...
