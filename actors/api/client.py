"""`CallClient`: makes the calls of one executor, in their callers' threads.

- A call is accepted or refused as a whole; a refused one leaves nothing in the plane or in memory.
- A blocking call runs in its caller's thread from the first byte to the last.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

from phalanx.actors.calls.call import Call, check_timeout, options_of
from phalanx.actors.calls.futures import CallFuture
from phalanx.actors.calls.streams import ReplyStream
from phalanx.actors.signals.process_exit import living
from phalanx.actors.spec.factory import culprit
from phalanx.runtime import Payload, encode
from phalanx.supervision import ExecutorClosed, NotPicklable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from phalanx.actors.calls.call import CallTap, OnTimeout, Shape
    from phalanx.actors.calls.streams import StreamInbox
    from phalanx.actors.group.handle import Group
    from phalanx.actors.observe.tracing import CallSpan
    from phalanx.actors.spec.worker import Methods


class CallClient:
    """Makes calls of the ranks of *group*, whose worker class has *methods*."""

    def __init__(self, group: Group, methods: Methods) -> None:
        self._group = group
        self._methods = methods
        self._plane = group.plane
        self._callbacks = group.callbacks
        self._trace = group.trace
        self._probe = group.probe
        self._hang_after = group.spec.limits.hang
        self._numbers = group.numbers
        self._bare: dict[str, tuple[Payload]] = {}  # calls without arguments, by method

    def call(
        self,
        shape: Shape,
        method: str | Callable[..., Any],
        each: list[tuple[tuple[Any, ...], Mapping[str, Any]]],
        *,
        timeout: float | None = None,
        retries: int | None = None,
        on_timeout: OnTimeout = "leave",
        want: int | None = None,
        rank: int | None = None,
        non_block: bool = False,
        tell: bool = False,
        stream: StreamInbox | None = None,
        aggregate: Callable[[list[Any], int], Any] | None = None,
        lead: int = 0,
        at_once: bool = False,
    ) -> Any:
        """Make a call, and return its value, its future or its stream.

        Args:
            shape: The ranks it goes to.
            method: As in `Executor.collective_rpc`, like the options that are not named here.
            each: Arguments: one pair for all ranks, or one for each.
            want: The rank whose value is wanted; None for every rank's.
            rank: The rank of a SINGLE call.
            tell: Whether the outcome is discarded.
            stream: The inbox of its items, if it is a stream.
            lead: What *aggregate* gets beside the values.
            at_once: With *non_block*: never block, however many calls are queued.
        """
        if timeout is not None:
            check_timeout(timeout)  # first: arguments in its place are missing elsewhere
        name, declared = self._methods.declared_of(method, each)
        options = options_of(
            now=0.0 if timeout is None else self._plane.clock(),
            timeout=timeout,
            retries=int(declared.idempotent) if retries is None else retries,
            on_timeout=on_timeout,
            tell=tell,
        )
        self._group.check_process()
        self._plane.check_may_enter(name, waits=not non_block)
        if not non_block:
            self._callbacks.check_may_wait(name)
        tap: CallTap | None = None
        if self._probe is not None:
            kind = shape.name.lower()
            tap = self._probe.tap(name, method, shape=kind, rank=rank, is_stream=stream is not None)
            method = tap.method
        span = self._trace.call(name, shape, rank, is_stream=stream is not None)
        payloads = self._payloads(name, method, each, span)
        call = Call(next(self._numbers), name, shape, payloads, options)
        if span is not None:
            span.sent_as(call.seq)
            call.span = span
        call.want = want
        call.rank = rank
        call.tap = tap
        call.stream = stream
        limit = declared.hang_after
        if limit is None:
            limit = self._hang_after
        call.hang_after = None if limit == math.inf else limit
        if aggregate is None:
            decode: Callable[[Call], Any] = Call.result
        else:
            decode = functools.partial(Call.result, aggregate=aggregate, lead=lead)
        if non_block:
            return self._submit(call, decode, at_once=at_once)
        return self._wait_for(call, decode)

    def _submit(
        self, call: Call, decode: Callable[[Call], Any], *, at_once: bool
    ) -> CallFuture | ReplyStream:
        """Send *call*, or have it wait for its turn, and return what becomes of it."""
        plane = self._plane
        try:
            plane.submit(call, waits=False, at_once=at_once)
        except BaseException as error:
            plane.abandon(call, error)
            if call.span is not None:
                call.span.refused(error)
            raise
        if call.span is not None:  # not by who settles it: what exports spans may take its time
            later = functools.partial(self._callbacks.run, call.span.end)
            plane.when_settled(call, later)
        if call.options.deadline is not None:
            self._expire_later(call, call.options.deadline)
        if call.stream is not None:
            return ReplyStream(call, plane, self._callbacks)
        return CallFuture(call, plane, self._callbacks, decode)

    def _wait_for(self, call: Call, decode: Callable[[Call], Any]) -> Any:
        """Send *call* and return its value, or raise its error."""
        plane = self._plane
        try:
            plane.submit(call, waits=True)
            if not plane.wait(call, call.options.deadline):
                _restart_late(self._group, call, plane.expire(call))
        except BaseException as error:
            if isinstance(error, ExecutorClosed):
                living.stay_until_the_end()
            plane.abandon(call, error)  # Ctrl-C: no caller waits for the answer
            if call.span is not None:
                call.span.refused(error)
            raise
        if call.span is not None:
            call.span.end(call)
        if isinstance(call.error, ExecutorClosed):
            living.stay_until_the_end()
        return decode(call)

    def _payloads(
        self,
        name: str,
        method: object,
        each: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]],
        span: CallSpan | None,
    ) -> Sequence[Payload]:
        """Return what is to be sent, one for all ranks or one for each."""
        if span is None and len(each) == 1 and isinstance(method, str):
            args, kwargs = each[0]
            if not args and not kwargs:  # the same bytes each time
                bare = self._bare.get(method)
                if bare is None:
                    encoded = encode((method, (), _NO_KEYWORDS), name)
                    bare = self._bare[method] = (Payload.of(encoded),)
                return bare
        payloads: list[Payload] = []
        try:
            for args, kwargs in each:
                what = (method, args, kwargs)
                try:
                    encoded = encode(
                        what if span is None else (*what, span.carrier), f"the arguments of {name}"
                    )
                except NotPicklable as error:
                    raise culprit(name, args, kwargs, error) from error.__cause__
                payloads.append(self._plane.pack(encoded))
        except BaseException as error:
            if span is not None:
                span.refused(error)
            for payload in payloads:  # what one rank was to get cannot travel
                payload.close()
            raise
        return payloads

    def _expire_later(self, call: Call, deadline: float) -> None:
        group = self._group  # not the executor: a timer must not keep a forgotten one alive

        def expire() -> None:
            _restart_late(group, call, group.plane.expire(call))

        call.timer = group.runtime.loop.call_at(deadline, expire)
        if call.done:
            call.timer.cancel()


_NO_KEYWORDS: Mapping[str, Any] = {}


def _restart_late(group: Group, call: Call, late: Mapping[int, int]) -> None:
    """Have those who owe *call* (rank: incarnation) restarted, where it asks for that."""
    if call.options.on_timeout != "restart":
        return
    why = f"{call.name} (call {call.seq}) took longer than {call.options.timeout:g} s"
    for rank, incarnation in late.items():
        group.post(group.actor.health.overdue, rank, incarnation, why)
