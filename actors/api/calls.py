"""Call methods of the executor.

The calls of a rank group: to all its ranks, to each, to one, to whichever is idle.

Guarantees: what makes no sense of a call is told before anything is sent.

Left to others: how a call is made (`Caller`, or `InlineGroup` in the caller's own thread).

The step methods of an executor: its worker class's own, as functions with their signatures.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast, overload

from phalanx.actors.calls.call import Shape
from phalanx.actors.calls.streams import Incoming
from phalanx.actors.spec.validate import (
    check_callable,
    check_count,
    check_per_rank,
    check_rank,
    check_seconds,
)
from phalanx.actors.spec.worker import WorkerActor
from phalanx.supervision import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from phalanx.actors.calls.futures import CallFuture
    from phalanx.actors.calls.streams import ReplyStream
    from phalanx.actors.spec.layout import Layout
    from phalanx.actors.spec.results import Outcome
    from phalanx.actors.spec.worker import Method

    from .group import RankGroup
    from .inline import InlineGroup


class Steps:
    """The step methods of an executor."""

    def __init__(self, executor: object) -> None:
        self._executor = executor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


def step_function(
    collective_rpc: Callable[..., Any], layout: Layout, method: Method
) -> Callable[..., Any]:
    """Return a function that makes the step *method* a *collective_rpc*, as it is declared."""
    declared = method.declared
    reply = declared.reply
    want = layout.output_rank if reply == "output" else reply if isinstance(reply, int) else None
    drivers = layout.driver_ranks

    def pick(values: list[Any], _lead: int) -> list[Any]:
        return [values[rank] for rank in drivers]

    def call(*args: Any, non_block: bool = False, **kwargs: Any) -> Any:
        return collective_rpc(
            method.name,
            declared.timeout,
            args,
            kwargs,
            non_block=non_block,
            unique_reply_rank=want,
            aggregate=pick if reply == "driver" else None,
        )

    call.__name__ = call.__qualname__ = method.name
    if method.signature is not None:
        call.__signature__ = method.signature  # type: ignore[attr-defined]  # inspect reads it
    return call


W = TypeVar("W", bound=WorkerActor)


class Dispatch(Generic[W]):
    """The calls of an executor. Its methods are `Executor`'s."""

    def __init__(
        self,
        group: RankGroup | InlineGroup,
        steps: Mapping[str, Method],
        *,
        at_once: bool = False,
    ) -> None:
        """Make calls of *group*; with *at_once* none blocks while too many wait for their turn."""
        self._group = group
        # Bound once: it is looked up for every call.
        self._call = functools.partial(group.call, at_once=True) if at_once else group.call
        self._steps = steps

    @property
    def _layout(self) -> Layout:
        return self._group.view().layout

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
        aggregate: Callable[[list[Any], int], Any] | None = None,
        on_death: Literal["fail", "retry"] | None = None,
        retries: int = 1,
        on_timeout: Literal["leave", "restart"] = "leave",
    ) -> Any:
        """Call *method* on every rank, as a whole.

        Args:
            method: A method's name, or a callable that gets the worker as its first argument.
            timeout: Seconds for the whole call, waiting for a restart included; None waits without
                limit, for ever on a worker that loops.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            non_block: Return a `CallFuture` at once.
            unique_reply_rank: Only this rank's value travels back, and is returned alone. An
                exception of any rank fails the call all the same.
            aggregate: Given the list of all ranks' values and the rank whose output leads
                (*unique_reply_rank*, else the layout's output rank), returns the call's value.
            on_death: ``"fail"``: at most once. ``"retry"``: at least once, sent again as a whole
                up to *retries* times after the group has healed. None takes what the method
                declares (`idempotent`), else ``"fail"``.
            retries: See *on_death*.
            on_timeout: ``"restart"`` treats ranks that have not answered in time as hung.

        Returns:
            The list of all ranks' values; with *unique_reply_rank* that value; with *aggregate*
            what it made of them.

        Raises:
            WorkerDied: a rank died after it had begun the call, or the group gave up, after too
                many deaths, before it was answered.
            CallTimeout: naming the ranks that had not answered.
            ExecutorClosed: the executor was closed first, or its group had ended already.
        """
        want, lead = unique_reply_rank, 0
        if unique_reply_rank is not None:
            check_rank("unique_reply_rank", unique_reply_rank, self._layout.world_size)
        if aggregate is not None:
            check_callable("aggregate", aggregate)
            lead = self._layout.output_rank if unique_reply_rank is None else unique_reply_rank
            want = None
        return self._call(
            Shape.COLLECTIVE,
            method,
            [_arguments(args, kwargs)],
            timeout=timeout,
            on_death=on_death,
            retries=retries,
            on_timeout=on_timeout,
            want=want,
            non_block=non_block,
            aggregate=aggregate,
            lead=lead,
        )

    @overload
    def gather(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        non_block: Literal[False] = False,
    ) -> list[Outcome]: ...
    @overload
    def gather(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        non_block: Literal[True],
    ) -> CallFuture: ...
    def gather(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        non_block: bool = False,
    ) -> list[Outcome] | CallFuture:
        """Call *method* on every rank, each for itself; return what became of it on each.

        A rank that raises, dies or runs out of time spoils only its own `Outcome`.
        """
        outcome: list[Outcome] | CallFuture = self._call(
            Shape.GATHER,
            method,
            [_arguments(args, kwargs)],
            timeout=timeout,
            on_death="fail",
            non_block=non_block,
        )
        return outcome

    def scatter(
        self,
        method: str | Callable[..., Any],
        per_rank: Sequence[Sequence[Any]],
        timeout: float | None = None,
        *,
        kwargs_per_rank: Sequence[Mapping[str, Any]] | None = None,
        non_block: bool = False,
        on_death: Literal["fail", "retry"] | None = None,
        retries: int = 1,
    ) -> Any:
        """Call *method* on every rank as a whole, each with arguments of its own.

        Args:
            method: As in `collective_rpc`.
            per_rank: One tuple of positional arguments per rank.
            timeout: As in `collective_rpc`, like the rest.
            kwargs_per_rank: One mapping of keyword arguments per rank.
            non_block: As above.
            on_death: As above.
            retries: As above.
        """
        size = self._layout.world_size
        each = check_per_rank("per_rank", per_rank, size)
        named = check_per_rank(
            "kwargs_per_rank", kwargs_per_rank or [dict[str, Any]()] * size, size
        )
        for index, values in enumerate(each):
            if not isinstance(values, list | tuple):
                raise SpecError(f"per_rank[{index}]", values, "give the arguments as a tuple")
        return self._call(
            Shape.COLLECTIVE,
            method,
            [(tuple(a), k) for a, k in zip(each, named, strict=True)],
            timeout=timeout,
            on_death=on_death,
            retries=retries,
            non_block=non_block,
        )

    def call(
        self,
        rank: int,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        non_block: bool = False,
        on_death: Literal["fail", "retry"] | None = None,
        retries: int = 1,
        on_timeout: Literal["leave", "restart"] = "leave",
    ) -> Any:
        """Call *method* on one rank and return its value; another rank's death does not matter."""
        check_rank("rank", rank, self._layout.world_size)
        return self._call(
            Shape.SINGLE,
            method,
            [_arguments(args, kwargs)],
            timeout=timeout,
            on_death=on_death,
            retries=retries,
            on_timeout=on_timeout,
            rank=rank,
            non_block=non_block,
        )

    def submit(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        on_death: Literal["fail", "retry"] | None = None,
        retries: int = 1,
    ) -> CallFuture:
        """Call *method* on whichever rank is idle first: a work queue over independent replicas.

        Returns at once with a future, unless too many calls wait for a rank already.
        """
        future: CallFuture = self._call(
            Shape.POOL,
            method,
            [_arguments(args, kwargs)],
            timeout=timeout,
            on_death=on_death,
            retries=retries,
            non_block=True,
        )
        return future

    def tell(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        rank: int | None = None,
    ) -> None:
        """Have *method* run on every rank, or on one, and do not wait; errors are logged."""
        if rank is not None:
            check_rank("rank", rank, self._layout.world_size)
        future = self._call(
            Shape.COLLECTIVE if rank is None else Shape.SINGLE,
            method,
            [_arguments(args, kwargs)],
            rank=rank,
            on_death="fail",
            non_block=True,
            tell=True,
        )
        name = method if isinstance(method, str) else getattr(method, "__name__", "a callable")
        future.add_done_callback(functools.partial(self._log_failure, name))

    def _log_failure(self, method: str, future: Future[Any]) -> None:
        """Log what a call of *method* ended in, that nobody waits for, if that is an error."""
        if not future.cancelled() and (error := future.exception()) is not None:
            self._group.log.error(
                "phalanx.tell_failed",
                method=method,
                rank=getattr(future, "failed_rank", 0),  # an inline one has no other
                error=repr(error),
                notes="\n".join(getattr(error, "__notes__", ())),
            )

    def stream(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        rank: int | None = None,
        window: int = 16,
        take_within: float | None = 60.0,
    ) -> ReplyStream:
        """Call a method that is a generator, and return what it yields as it is yielded.

        Args:
            method: As in `collective_rpc`; returns a generator, or anything that can be iterated.
            timeout: Seconds until the last item; None waits without limit. ``hang_after`` limits
                the making of each item; how long its taker takes counts for nobody.
            args: As in `collective_rpc`, like the rest.
            kwargs: As above.
            rank: The rank to call, whose items are then yielded as they are. None calls every
                rank, as a whole, and yields (rank, item) as they come.
            window: How many items a rank may make before they are taken.
            take_within: Seconds that items which have arrived may wait for the next to be taken.
                Then the stream is closed, which frees its ranks: items that arrived can still be
                taken, after them comes `StreamNotTaken`. None sets no limit.

        The worker serves nothing else until the stream has ended. Take it to its end, or close it:
        in a server, use it in a ``with``.
        """
        if rank is not None:
            check_rank("rank", rank, self._layout.world_size)
        check_count("window", window)
        if take_within is None:
            take_within = math.inf
        elif take_within != math.inf:
            check_seconds("take_within", take_within, positive=True)
        stream: ReplyStream = self._call(
            Shape.COLLECTIVE if rank is None else Shape.SINGLE,
            method,
            [_arguments(args, kwargs)],
            timeout=timeout,
            on_death="fail",
            rank=rank,
            non_block=True,
            stream=Incoming(window, take_within),
        )
        return stream

    @property
    def steps(self) -> W:
        """The step methods, typed as the worker class declares them; each answers one value."""
        return cast("W", Steps(self))

    def __getattr__(self, name: str) -> Any:
        """Return the step method *name* as a method of the executor."""
        method = self.__dict__.get("_steps", {}).get(name)
        if method is None:
            msg = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(msg)
        return step_function(self.collective_rpc, self._layout, method)


_NO_KEYWORDS: Mapping[str, Any] = {}


def _arguments(args: object, kwargs: object) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return the arguments of one call if that is what they are."""
    whole: Any = args  # what isinstance makes of it one checker knows, and the other does not
    if kwargs is None and isinstance(args, tuple):
        return whole, _NO_KEYWORDS
    if not isinstance(args, list | tuple):
        raise SpecError("args", args, "give the positional arguments as a tuple")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise SpecError("kwargs", kwargs, "give the keyword arguments as a mapping")
    return tuple(cast("Sequence[Any]", args)), cast("Mapping[str, Any]", kwargs or {})
