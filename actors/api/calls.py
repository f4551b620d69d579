"""Call methods of the executor: to all ranks, to each, to one, to any idle one, as a stream.

Arguments are checked before anything is sent.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast, overload

from phalanx.actors.calls.call import COLLECTIVE, GATHER, POOL, SINGLE, check_timeout
from phalanx.actors.calls.streams import StreamInbox
from phalanx.actors.spec.options import check_per_rank
from phalanx.actors.spec.worker import Proxy, WorkerActor
from phalanx.supervision import SpecError, check_callable, check_count, check_seconds

from .aio import outcome_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from phalanx.actors.calls.futures import CallFuture
    from phalanx.actors.calls.streams import ReplyStream
    from phalanx.actors.group.handle import Group
    from phalanx.actors.spec.layout import Layout
    from phalanx.actors.spec.results import Outcome
    from phalanx.actors.spec.worker import How
    from phalanx.testing.inline import InlineGroup

W = TypeVar("W", bound=WorkerActor)


class CallMethods(Generic[W]):
    """The call methods of `Executor`.

    Args:
        at_once: Whether no call blocks while too many are queued.
    """

    def __init__(self, group: Group | InlineGroup, *, at_once: bool = False) -> None:
        self._group = cast("Group", group)  # an inline one has the methods that are used
        # Bound once: it is looked up for every call.
        self._call = functools.partial(group.call, at_once=True) if at_once else group.call

    @property
    def group(self) -> Group:
        """The group behind the calls; for other handles of it."""
        return self._group

    @property
    def layout(self) -> Layout:
        """The layout of its ranks."""
        return self._group.view.layout

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
        retries: int | None = None,
        on_timeout: Literal["leave", "restart"] = "leave",
        on_death: Literal["fail", "retry"] | None = None,
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
            retries: After how many deaths in it the call is sent again, as a whole, once the group
                serves again. 0: at most once. None: 1 if the method is declared idempotent
                (`method`), else 0.
            on_timeout: ``"restart"`` treats ranks that have not answered in time as hung.
            on_death: Deprecated: *retries* replaces it.

        Returns:
            The list of all ranks' values; with *unique_reply_rank* that value; with *aggregate*
            what it made of them.

        Raises:
            WorkerDied: a rank died after it had begun the call, or the group gave up, after too
                many deaths, before it was answered.
            CallTimeout: naming the ranks that had not answered.
            ExecutorClosed: the executor was closed first, or its group had ended already.
        """
        if on_death is not None:
            retries = _retries(retries, on_death)
        want, lead = unique_reply_rank, 0
        if unique_reply_rank is not None:
            self.layout.check_rank("unique_reply_rank", unique_reply_rank)
        if aggregate is not None:
            check_callable("aggregate", aggregate)
            want, lead = None, unique_reply_rank or 0
        return self._call(
            COLLECTIVE,
            method,
            [_arguments(args, kwargs)],
            timeout=timeout,
            retries=retries,
            on_timeout=on_timeout,
            want=want,
            non_block=non_block,
            aggregate=aggregate,
            lead=lead,
            of_output=aggregate is not None and unique_reply_rank is None,
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
    ) -> Any:
        """Call *method* on every rank, each for itself; return the `Outcome` of each.

        A rank that raises, dies or runs out of time affects only its own.
        """
        each = [_arguments(args, kwargs)]
        return self._call(GATHER, method, each, timeout=timeout, retries=0, non_block=non_block)

    def scatter(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Sequence[Any]] | None = None,
        kwargs: Sequence[Mapping[str, Any]] | None = None,
        *,
        non_block: bool = False,
        retries: int | None = None,
        on_death: Literal["fail", "retry"] | None = None,
    ) -> Any:
        """Call *method* as `collective_rpc` does, with one set of arguments per rank.

        *args* is one tuple of positional arguments per rank, *kwargs* one mapping of keyword
        arguments per rank; None for none.
        """
        if on_death is not None:
            retries = _retries(retries, on_death)
        if isinstance(timeout, list | tuple):
            timeout, args = None, _moved("scatter", timeout)
        size = self.layout.world_size
        each = check_per_rank("args", [()] * size if args is None else args, size)
        named = check_per_rank("kwargs", kwargs or [dict[str, Any]()] * size, size)
        return self._call(
            COLLECTIVE,
            method,
            [_arguments(each[rank], named[rank], f"[{rank}]") for rank in range(size)],
            timeout=timeout,
            retries=retries,
            non_block=non_block,
            size=size,
        )

    def call(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        rank: int,
        non_block: bool = False,
        retries: int | None = None,
        on_timeout: Literal["leave", "restart"] = "leave",
        on_death: Literal["fail", "retry"] | None = None,
    ) -> Any:
        """Call *method* on one rank and return its value.

        Another rank's death does not matter, unless the strategy restarts this rank with it.
        """
        if on_death is not None:
            retries = _retries(retries, on_death)
        self.layout.check_rank("rank", rank)
        return self._call(
            SINGLE,
            method,
            [_arguments(args, kwargs)],
            timeout=timeout,
            retries=retries,
            on_timeout=on_timeout,
            rank=rank,
            non_block=non_block,
        )

    def submit(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        retries: int | None = None,
        on_death: Literal["fail", "retry"] | None = None,
    ) -> CallFuture:
        """Call *method* on the first rank that is idle: a work queue over independent replicas.

        Returns at once with a future, unless too many calls wait for a rank already.
        """
        if on_death is not None:
            retries = _retries(retries, on_death)
        if isinstance(timeout, list | tuple):
            timeout, args = None, _moved("submit", timeout)
        future: CallFuture = self._call(
            POOL,
            method,
            [_arguments(args, kwargs)],
            timeout=timeout,
            retries=retries,
            non_block=True,
        )
        return future

    def tell(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        rank: int | None = None,
    ) -> None:
        """Call *method* on every rank, or on one, without waiting for it; errors are logged."""
        if isinstance(timeout, list | tuple):
            timeout, args = None, _moved("tell", timeout)
        if rank is not None:
            self.layout.check_rank("rank", rank)
        future = self._call(
            COLLECTIVE if rank is None else SINGLE,
            method,
            [_arguments(args, kwargs)],
            timeout=timeout,
            rank=rank,
            retries=0,
            non_block=True,
            tell=True,
        )
        name = method if isinstance(method, str) else getattr(method, "__name__", "a callable")

        def log_failure(done: Any) -> None:
            if not done.cancelled() and (error := done.exception()) is not None:
                self._group.log.error(
                    "phalanx.tell_failed",
                    method=name,
                    rank=done.failed_rank,
                    error=repr(error),
                    notes="\n".join(getattr(error, "__notes__", ())),
                )

        future.add_done_callback(log_failure)

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

        Anything else that can be iterated will do, as a value of the method.

        Args:
            timeout: Seconds until the last item; None waits without limit. ``hang_after`` limits
                the making of each item, not the time that items wait to be taken.
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
            self.layout.check_rank("rank", rank)
        check_count("window", window)
        if take_within is None:
            take_within = math.inf
        check_seconds("take_within", take_within, positive=True, finite=False)
        stream: ReplyStream = self._call(
            COLLECTIVE if rank is None else SINGLE,
            method,
            [_arguments(args, kwargs)],
            timeout=timeout,
            retries=0,
            rank=rank,
            non_block=True,
            stream=StreamInbox(window, take_within),
        )
        return stream

    # --- methods without strings ----------------------------------------------------------

    def proxy(
        self,
        *,
        rank: int | None = None,
        any: bool = False,  # noqa: A002  # any rank
        timeout: float | None = None,
        retries: int | None = None,
    ) -> W:
        """Return an object with the worker's methods, typed as the class declares them.

        ``proxy().forward(batch)`` calls all ranks and returns the value of one: the rank that the
        method declares with ``@method(reply=...)``, else the layout's output rank. Each method is
        a `RemoteMethod`: ``forward.future(batch)`` returns a `CallFuture`, and
        ``await forward.aio(batch)`` does not block the event loop; for the type checker, of
        methods that are declared with `method`.

        Args:
            rank: Call this rank alone.
            any: Call the first rank that is idle.
            timeout: As in `collective_rpc`, like *retries*; None takes that of the method, if it
                declares one.
        """
        if rank is not None:
            self.layout.check_rank("rank", rank)
            if any:
                raise SpecError("any", any, f"give either it or rank={rank}")
        check_timeout(math.inf if timeout is None else timeout)
        check_count("retries", 0 if retries is None else retries, 0)

        def make(how: How, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            calls = self._at_once() if how == "awaitable" else self
            declared = self._group.methods.find(name).declared
            limit = declared.timeout if timeout is None else timeout

            def call(*, timeout: float | None = limit, non_block: bool = True) -> Any:
                words = (name, timeout, args, kwargs)
                if rank is not None:
                    return calls.call(*words, rank=rank, retries=retries, non_block=non_block)
                if any:
                    future = calls.submit(*words, retries=retries)
                    return future if non_block else future.result()
                return calls.declared_call(*words, retries=retries, non_block=non_block)

            if how == "awaitable":
                return outcome_of(self._group, name, limit, call)
            return call(non_block=how == "future")

        return cast("W", Proxy(make))

    def _at_once(self) -> CallMethods[W]:
        return CallMethods(self._group, at_once=True)

    def declared_call(
        self,
        name: str,
        timeout: float | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        retries: int | None = None,
        non_block: bool = False,
    ) -> Any:
        """Call the method *name* on every rank; return the value that it declares."""
        declared = self._group.methods.find(name).declared
        reply = declared.reply
        if timeout is None:
            timeout = declared.timeout
        terms: dict[str, Any] = {"retries": retries, "non_block": non_block}
        if reply == "every" or isinstance(reply, int):
            want = None if reply == "every" else reply
            return self.collective_rpc(name, timeout, args, kwargs, unique_reply_rank=want, **terms)
        if reply == "driver":
            layout = self.layout
            terms["aggregate"] = functools.partial(_chosen, layout.driver_ranks)
            terms["size"] = layout.world_size
        else:
            terms |= {"want": 0, "of_output": True}
        each = [_arguments(args, kwargs)]
        return self._call(COLLECTIVE, name, each, timeout=timeout, **terms)

    @property
    def steps(self) -> W:
        """The former name of `proxy`."""
        warnings.warn(
            "phalanx: Executor.steps is deprecated: write proxy()", DeprecationWarning, stacklevel=2
        )
        return self.proxy()

    def __getattr__(self, name: str) -> Any:
        """Return a method that declares a reply as a method of the executor: the former `proxy`."""
        group: Group | None = self.__dict__.get("_group")
        if group is None or not group.methods.declares_reply(name):
            msg = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(msg)
        text = f"phalanx: Executor.{name}() is deprecated: write proxy().{name}()"
        warnings.warn(text, DeprecationWarning, stacklevel=2)

        def call(*args: Any, non_block: bool = False, **kwargs: Any) -> Any:
            return self.declared_call(name, None, args, kwargs, non_block=non_block)

        return call


_NO_KEYWORDS: Mapping[str, Any] = {}


def _arguments(
    args: object, kwargs: object, of: str = ""
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return the arguments *of* one call, or rank of it, if that is what they are."""
    whole: Any = args  # mypy and pyright narrow it differently
    if kwargs is None and isinstance(args, tuple):
        return whole, _NO_KEYWORDS
    if not isinstance(args, list | tuple):
        raise SpecError(f"args{of}", args, "give the positional arguments as a tuple")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise SpecError(f"kwargs{of}", kwargs, "give the keyword arguments as a mapping")
    return tuple(cast("Sequence[Any]", args)), cast("Mapping[str, Any]", kwargs or {})


def _chosen(ranks: Sequence[int], values: list[Any], _lead: int) -> list[Any]:
    return [values[rank] for rank in ranks]


def _moved(name: str, args: Any) -> Any:
    """Return *args*, which the former signature of the method *name* had in second place."""
    text = f"phalanx: {name}(method, args) is deprecated: write {name}(method, args=...)"
    warnings.warn(text, DeprecationWarning, stacklevel=3)
    return args


def _retries(retries: int | None, on_death: object) -> int | None:
    """Return the *retries* that the former option *on_death* stands for."""
    text = "phalanx: on_death is deprecated: write retries=0 for 'fail', retries=1 for 'retry'"
    warnings.warn(text, DeprecationWarning, stacklevel=3)
    if on_death not in ("fail", "retry"):
        raise SpecError("on_death", on_death, "give retries instead")
    return 0 if on_death == "fail" else 1 if retries is None else retries
