"""`RankGroup`: a rank group and the way to call it, in the callers' threads.

- A call is accepted or refused as a whole; a refused one leaves nothing in the plane or in memory.
- A blocking call runs in its caller's thread from the first byte to the last.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

from phalanx.actors.calls.call import DEFAULT, Call, check_timeout, options_of
from phalanx.actors.calls.futures import CallFuture
from phalanx.actors.calls.streams import ReplyStream
from phalanx.actors.group.handle import Group
from phalanx.actors.health.check_health import check_health
from phalanx.actors.signals.driver_exit import open_executors
from phalanx.actors.spec.factory import culprit
from phalanx.runtime import Payload, encode
from phalanx.supervision import ExecutorClosed, NotPicklable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from phalanx.actors.calls.call import OnTimeout, Shape
    from phalanx.actors.calls.streams import StreamInbox
    from phalanx.actors.observe.hooks import CallProbe
    from phalanx.actors.observe.tracing import CallSpan
    from phalanx.actors.spec.options import ExecutorSpec
    from phalanx.actors.spec.worker import Methods
    from phalanx.runtime import Runtime


class RankGroup(Group):
    """A group of which calls can be made; its worker class has *methods*; see `Group`."""

    def __init__(
        self, spec: ExecutorSpec, methods: Methods, runtime: Runtime | None, **how: Any
    ) -> None:
        super().__init__(spec, runtime, **how)
        self._methods = methods
        self._hang_after = self.spec.limits.hang
        self._bare: dict[str, tuple[Payload]] = {}  # calls without arguments, by method

    def check_health(self, timeout: float) -> None:
        """See `Executor.check_health`."""
        check_health(self, self.call, timeout)

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
        """Make a call, and return its value, its future or its stream; see `Call`.

        Args:
            each: Arguments: one pair for all ranks, or one for each.
            tell: Whether the outcome is discarded.
            at_once: With *non_block*: never block, however many calls are queued.
        """
        if timeout is not None:
            check_timeout(timeout)  # first: arguments in its place are missing elsewhere
        name, declared = self._methods.declared_of(method, each)
        if retries is None:
            retries = 1 if declared.idempotent else 0
        options = DEFAULT
        if timeout is not None or retries != 0 or tell or on_timeout != "leave":
            options = options_of(
                now=0.0 if timeout is None else self.plane.clock(),
                timeout=timeout,
                retries=retries,
                on_timeout=on_timeout,
                tell=tell,
            )
        self.check_process()
        self.plane.check_may_enter(name, waits=not non_block)
        if not non_block:
            self.callbacks.check_may_wait(name)
        probe: CallProbe | None = None
        if self.probe is not None:
            probe = self.probe.call_probe(name, method, is_stream=stream is not None)
            method = probe.method
        seq = next(self.numbers)
        span = self.trace.call(name, shape, seq, rank, is_stream=stream is not None)
        payloads = self._payloads(name, method, each, span)
        call = Call(seq, name, shape, payloads, options)
        call.span = span
        call.want = want
        call.rank = rank
        call.probe = probe
        call.stream = stream
        limit = declared.hang_after
        if limit is None:
            limit = self._hang_after
        call.hang_after = None if limit == math.inf else limit
        call.aggregate = aggregate
        call.lead = lead
        if non_block:
            return self._submit(call, at_once=at_once)
        return self._wait_for(call)

    def _submit(self, call: Call, *, at_once: bool) -> CallFuture | ReplyStream:
        """Send *call*, or have it wait for its turn, and return what becomes of it."""
        plane = self.plane
        try:
            plane.submit(call, waits=False, at_once=at_once)
        except BaseException as error:
            plane.abandon(call, error)
            if call.span is not None:
                call.span.refused(error)
            raise
        if call.span is not None:  # not by who settles it: what exports spans may take its time
            later = functools.partial(self.callbacks.run, call.span.end)
            plane.when_settled(call, later)
        if call.options.deadline is not None:
            expire = functools.partial(self._expire, call)
            call.timer = self.runtime.loop.call_at(call.options.deadline, expire)
            if call.done:
                call.timer.cancel()
        if call.stream is not None:
            return ReplyStream(call, plane, self.callbacks)
        return CallFuture(call, plane, self.callbacks)

    def _wait_for(self, call: Call) -> Any:
        """Send *call* and return its value, or raise its error."""
        plane = self.plane
        try:
            plane.submit(call, waits=True)
            if not plane.wait(call, call.options.deadline):
                self._expire(call)
        except BaseException as error:
            if isinstance(error, ExecutorClosed):
                open_executors.stay_until_the_end()
            plane.abandon(call, error)  # Ctrl-C: no caller waits for the answer
            if call.span is not None:
                call.span.refused(error)
            raise
        if call.span is not None:
            call.span.end(call)
        if isinstance(call.error, ExecutorClosed):
            open_executors.stay_until_the_end()
        return call.result()

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
                payloads.append(self.plane.pack(encoded))
        except BaseException as error:
            if span is not None:
                span.refused(error)
            for payload in payloads:  # what one rank was to get cannot travel
                payload.close()
            raise
        return payloads

    def _expire(self, call: Call) -> None:
        """Settle *call* as timed out, and restart the ranks that owe it if it asks for that."""
        late = self.plane.expire(call)
        if call.options.on_timeout == "restart":
            why = f"{call.name} (call {call.seq}) took longer than {call.options.timeout:g} s"
            for rank, incarnation in late.items():
                self.post(self.actor.health.overdue, rank, incarnation, why)


_NO_KEYWORDS: Mapping[str, Any] = {}
