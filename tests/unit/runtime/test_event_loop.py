from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.support.processes import LONG, wait_until

from phalanx.runtime.process.launcher import Launcher
from phalanx.runtime.runtime import Runtime
from phalanx.runtime.threads.event_loop import EventLoop, Timer, Watch
from phalanx.supervision import RuntimeFault


def on_loop(loop: EventLoop) -> None:
    """Return when the loop has been through everything posted before."""
    done = threading.Event()
    loop.post(done.set)
    assert done.wait(LONG)


def test_a_watch_calls_back_on_the_loops_thread_and_is_paused_and_cancelled_from_any(
    loop: EventLoop, pipe: tuple[int, int]
) -> None:
    read, write = pipe
    os.set_blocking(read, False)
    seen: list[tuple[bytes, bool]] = []
    news = threading.Event()

    def callback(events: int) -> None:
        seen.append((os.read(read, 10), loop.is_current()))
        news.set()

    watch = loop.watch(read, 0, callback)
    os.write(write, b"a")
    on_loop(loop)
    assert seen == []
    watch.modify(select.EPOLLIN)
    assert news.wait(LONG)
    watch.cancel()
    watch.cancel()
    watch.modify(select.EPOLLIN)
    os.write(write, b"b")
    on_loop(loop)
    assert seen == [(b"a", True)]
    assert not loop.is_current()


def test_a_watch_that_an_earlier_callback_cancelled_is_not_called(loop: EventLoop) -> None:
    pipes = [os.pipe() for _ in range(2)]
    watches: list[Watch] = []
    called: list[int] = []

    def callback(_: int) -> None:
        called.append(1)
        for watch in watches:
            watch.cancel()

    def begin() -> None:
        # On the loop's thread, so that both are ready before either is seen.
        for read, write in pipes:
            watches.append(loop.watch(read, select.EPOLLIN, callback))
            os.write(write, b"x")

    loop.post(begin)
    on_loop(loop)
    on_loop(loop)

    assert called == [1]
    for pair in pipes:
        for fd in pair:
            os.close(fd)


def test_timers_come_in_the_order_of_their_times_and_not_before(loop: EventLoop) -> None:
    now = time.monotonic()
    seen: list[tuple[float, bool]] = []
    done = threading.Event()

    def note(delay: float) -> None:
        seen.append((delay, time.monotonic() >= now + delay))
        if len(seen) == 3:
            done.set()

    for delay in (0.06, 0.02, 0.04):
        loop.call_at(now + delay, partial(note, delay))

    assert done.wait(LONG)
    assert seen == [(0.02, True), (0.04, True), (0.06, True)]


def test_a_cancelled_timer_is_not_called_and_leaves_no_memory(loop: EventLoop) -> None:
    called: list[int] = []
    timers: list[Timer] = []

    def set_and_cancel() -> None:
        """On the loop's thread, which runs no other callback meanwhile."""
        now = time.monotonic()
        timers.extend(loop.call_at(now, lambda: called.append(1)) for _ in range(1000))
        for timer in timers:
            timer.cancel()

    loop.post(set_and_cancel)
    on_loop(loop)
    done = threading.Event()
    loop.call_at(time.monotonic() + 0.02, done.set)

    assert done.wait(LONG)
    assert called == []
    assert len(loop._timers) < 200
    assert not timers[0].is_pending


class Silent:
    """Raises when it is called, and has no text."""

    def __call__(self) -> None:
        raise SystemExit(3)

    def __repr__(self) -> str:
        raise SystemExit(4)


def test_a_callback_that_raises_ends_nothing_though_its_error_cannot_be_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(_event: object) -> None:
        raise KeyError

    told = EventLoop(emit=fail)
    told.post(Silent())
    told.call_at(time.monotonic(), Silent())
    on_loop(told)
    on_loop(told)
    told.close()

    assert capsys.readouterr().err.count("SystemExit: 3") == 2


def test_posts_keep_their_order_and_those_before_a_close_still_run(loop: EventLoop) -> None:
    seen: list[int] = []
    for number in range(100):
        loop.post(partial(seen.append, number))
    loop.close()

    assert seen == list(range(100))
    with pytest.raises(RuntimeFault, match="closed"):
        loop.post(lambda: None)


def test_a_loop_can_be_closed_from_its_own_callback(loop: EventLoop) -> None:
    loop.post(loop.close)
    loop._thread.join(LONG)

    assert not loop._thread.is_alive()


def test_a_loop_at_rest_is_not_woken(loop: EventLoop) -> None:
    on_loop(loop)
    thread = loop._thread.native_id

    def wakeups(after: float = 0.0) -> str:
        time.sleep(after)
        status = Path(f"/proc/self/task/{thread}/status").read_text()
        return next(line for line in status.splitlines() if line.startswith("voluntary"))

    loop.call_at(time.monotonic() + 3600, lambda: None)
    on_loop(loop)
    wait_until(lambda: wakeups() == wakeups(after=0.2), "its sleep after the last post")
    before = wakeups()

    assert wakeups(after=0.5) == before


def test_a_forked_child_of_the_driver_cannot_use_the_loop(loop: EventLoop) -> None:
    mine = loop._epoll.fileno(), loop._wakeup
    pid = os.fork()
    if pid == 0:
        code = 0
        for fd in mine:
            try:
                os.fstat(fd)
                code = 1  # the child still holds the parent's descriptor
            except OSError:
                pass
        try:
            loop.post(lambda: None)
            code = 2
        except RuntimeFault:
            pass
        loop.close()
        os._exit(code)

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    on_loop(loop)


def test_the_loop_may_be_called_in_the_middle_of_a_call(loop: EventLoop) -> None:
    done = threading.Event()

    class Sly(float):
        """A time that is compared with others under the loop's lock, where finalizers may run."""

        def __lt__(self, other: float) -> bool:
            loop.post(done.set)
            loop.note_cancelled_timer()
            return float(self) < float(other)

    later = loop.call_at(time.monotonic() + 1000, lambda: None)
    timer = loop.call_at(Sly(time.monotonic() + 999), lambda: None)

    assert done.wait(LONG)
    timer.cancel()
    later.cancel()


def test_a_loop_whose_descriptors_were_closed_refuses_all_and_says_why(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lost = EventLoop()

    def close() -> None:
        os.close(lost._epoll.fileno())

    lost.post(close)
    lost._thread.join(LONG)

    assert "Bad file descriptor" in capsys.readouterr().err
    for use in (lambda: lost.post(close), lambda: lost.call_at(0.0, close)):
        with pytest.raises(RuntimeFault, match="event loop of this process has ended: OSError"):
            use()
    lost.close()


@pytest.mark.parametrize(
    ("kind", "step"), [(threading.Thread, "start"), (Launcher, "__init__")], ids=["loop", "runtime"]
)
def test_a_runtime_that_cannot_be_built_leaves_neither_descriptor_nor_thread(
    monkeypatch: pytest.MonkeyPatch, kind: type, step: str
) -> None:
    def held() -> tuple[int, int]:
        return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))

    before = held()

    def refuse(*_args: object, **_options: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(kind, step, refuse)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="can't start"):
                Runtime(console=None, stream=False)

    assert held() == before


def test_what_is_posted_while_the_loop_ends_by_an_error_is_still_called(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lost, failing, accepted = EventLoop(), threading.Event(), threading.Event()

    class Never(float):
        """A time at which the loop fails, once a post has been accepted."""

        def __sub__(self, _now: float) -> float:
            failing.set()
            accepted.wait(LONG)
            raise ArithmeticError

    class Posts(deque[Callable[[], None]]):
        def append(self, callback: Callable[[], None]) -> None:
            accepted.set()
            lost._thread.join(0.2)
            super().append(callback)

    lost._posted = Posts()
    lost.call_at(Never("inf"), lambda: None)
    assert failing.wait(LONG)
    on_loop(lost)

    assert "ArithmeticError" in capsys.readouterr().err
    lost.close()


def test_who_meets_a_closed_descriptor_before_the_loop_does_gets_no_bare_os_error(
    pipe: tuple[int, int],
) -> None:
    lost, notified = EventLoop(), threading.Event()
    reading, writing = pipe
    null = os.open(os.devnull, os.O_RDONLY)
    watch = lost.watch(reading, select.EPOLLIN, lambda _events: None)
    lost.when_lost(lambda _cause: notified.set())
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        release.wait(LONG)

    lost.post(hold)
    assert held.wait(LONG)
    os.dup2(null, lost._epoll.fileno())

    watch.modify(0)
    with pytest.raises(RuntimeFault, match="closed a descriptor of its event loop"):
        lost.watch(writing, 0, lambda _events: None)
    release.set()

    assert notified.wait(LONG)
    lost.close()
    os.close(null)


def test_a_watched_descriptor_that_its_owner_has_closed_is_the_owners_error(
    loop: EventLoop,
) -> None:
    reading, writing = os.pipe()
    watch = loop.watch(reading, select.EPOLLIN, lambda _events: None)
    os.close(reading)
    os.close(writing)

    with pytest.raises(OSError, match="Bad file descriptor"):
        watch.modify(0)
    watch.cancel()
    on_loop(loop)
