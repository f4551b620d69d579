"""Finalizers and signal handlers that call an executor in the middle of its own code."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.options import Make
from tests.support.processes import start_thread, wait_until
from tests.support.programs import run_python
from tests.support.workers import Echo

from phalanx.actors import Executor, Launch
from phalanx.actors.calls.callbacks import CallbackThread
from phalanx.actors.calls.futures import CallFuture
from phalanx.runtime import Runtime
from phalanx.supervision import ExecutorClosed, ProtectedActor, WouldDeadlock

WAIT = 30.0
Handle = Callable[[Callable[[], Any]], list[Any]]

# The future is dropped, so what decodes its answer dies when the answer comes, with the plane's
# lock in the hands of whoever reads it: as where the collector runs there, but each time. In a
# process of its own: what the test is about would hold up all others.
FINALIZER = """
from phalanx import Executor
from phalanx.errors import ExecutorClosed, WouldDeadlock
from tests.support.workers import Echo

class Dying:
    def __init__(self, act):
        self.act = act
        self.outcome = []

    def look(self, values, lead):
        return values

    def __del__(self):
        try:
            self.outcome.append(self.act())
        except BaseException as error:
            self.outcome.append(error)

def what_becomes_of(act):
    dying = Dying(act)
    outcome = dying.outcome
    executor.collective_rpc("echo", non_block=True, aggregate=dying.look)
    del dying
    while not outcome:
        executor.collective_rpc("echo", timeout=20)
    return outcome[0]

with Executor(Echo, 1, launch={'preload': ()}) as executor:
    kept = executor.collective_rpc("echo", non_block=True)
    for act in (
        lambda: executor.tell("echo"),
        lambda: executor.collective_rpc("echo", timeout=20),
        lambda: executor.collective_rpc("echo", non_block=True, timeout=20),
        lambda: executor.submit("echo"),
        lambda: next(executor.stream("echo")),
        lambda: executor.check_health(),
        lambda: executor.restart(timeout=20),
        lambda: executor.drain(timeout=20),
        lambda: executor.status(),
    ):
        error = what_becomes_of(act)
        assert isinstance(error, WouldDeadlock), error
        assert "another thread" in str(error)
        assert executor.collective_rpc("echo", timeout=20) == [None]
    try:
        assert what_becomes_of(executor.close) is None
        while True:
            executor.collective_rpc("echo", timeout=20)
    except ExecutorClosed:
        print("closed")
"""


def test_a_finalizer_under_the_planes_lock_gets_an_error_and_closing_waits_for_its_end() -> None:
    done = run_python("-c", FINALIZER)

    assert done.stdout == "closed\n", done.stderr
    assert done.returncode == 0


# What a finalizer may do wherever the collector happens to run: here in one of a hundred calls that
# the library makes, on any of its threads.
ANYWHERE = """
import random, sys, threading, time
from phalanx import Executor
from phalanx.errors import WouldDeadlock
from tests.support.workers import Echo

LARGE = bytes(300_000)
rng = random.Random(1)
local = threading.local()
strays = []
acting = []
enough = False
executor = None

def act(which):
    if which == 0:
        executor.tell("echo", args=(LARGE,))
    elif which == 1:
        executor.collective_rpc("echo", args=(LARGE,), timeout=20)
    elif which == 2:
        future = executor.collective_rpc("echo", non_block=True, timeout=20)
        future.add_done_callback(lambda _: None)
    elif which == 3:
        executor.collective_rpc("echo", non_block=True).abandon()
    else:
        executor.status()

def interrupt(frame, event, _):
    if executor is None or enough or getattr(local, "busy", False) or rng.random() > 0.01:
        return
    local.busy = True
    acting.append(1)
    try:
        if not enough:  # looked at again, now that it is known that somebody acts
            act(rng.randrange(5))
    except WouldDeadlock:
        pass
    except BaseException as error:
        strays.append(error)
    finally:
        local.busy = False
        acting.pop()

def traffic():
    for _ in range(20):
        assert made.collective_rpc("echo", args=(LARGE,), timeout=20) == [LARGE] * 2
        futures = [made.collective_rpc("echo", args=(n,), non_block=True, timeout=20)
                   for n in range(20)]
        for future in futures:
            future.add_done_callback(lambda _: None)
        assert [future.result() for future in futures] == [[n] * 2 for n in range(20)]

threading.setprofile(interrupt)
with Executor(Echo, 2, launch={'preload': ()}) as made:
    executor = made
    threads = [threading.Thread(target=traffic) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    enough = True
    while acting:  # the library's own threads, in the middle of it
        time.sleep(0.01)
    made.drain(timeout=20)
    status = made.status()
    print(strays, status.in_flight, status.waiting)
"""


def test_a_finalizer_that_calls_an_executor_anywhere_neither_hangs_nor_spoils_a_call() -> None:
    done = run_python("-c", ANYWHERE)

    assert done.stdout == "[] 0 0\n", done.stderr
    assert done.stderr == ""


@pytest.fixture
def handle() -> Iterator[Handle]:
    """Has SIGUSR1 make a call; returns the list that what becomes of it is added to."""
    before = signal.getsignal(signal.SIGUSR1)

    def install(act: Callable[[], Any]) -> list[Any]:
        outcome: list[Any] = []

        def handler(*_: object) -> None:
            try:
                outcome.append(act())
            except BaseException as error:  # it is what is looked at
                outcome.append(error)

        signal.signal(signal.SIGUSR1, handler)
        return outcome

    yield install
    signal.signal(signal.SIGUSR1, before)


def interrupt(executor: Executor[Any], outcome: list[Any], gate: Path) -> None:
    """Strike the main thread once it waits; open *gate* once that is over."""
    reading = executor._group.plane._reader  # nobody else is told of it
    main = threading.main_thread().ident
    wait_until(lambda: reading._reader == main or main in reading._sleepers)
    os.kill(os.getpid(), signal.SIGUSR1)
    wait_until(lambda: outcome)
    gate.touch()


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("what", ["call", "result", "restart"])
def test_a_signal_handler_may_not_wait_where_its_thread_does(
    make: Make, gate: Path, handle: Handle, what: str, reads: bool
) -> None:
    executor = make(world_size=2)
    arguments = ("gated", WAIT, (str(gate),))
    first = threading.Thread(target=executor.call, args=arguments, kwargs={"rank": 0})
    if not reads:  # another thread does, and the main one sleeps meanwhile
        first.start()
        wait_until(lambda: executor.status().in_flight >= 1)
    acts: dict[str, Callable[[], Any]] = {
        "call": lambda: executor.call("echo", 3.0, rank=1),
        "result": lambda: executor.call("echo", non_block=True, rank=0).result(3.0),
        "restart": lambda: executor.restart(1, timeout=3.0),
    }
    outcome = handle(acts[what])
    other = start_thread(interrupt, executor, outcome, gate)

    answer = executor.call("gated", WAIT, args=(str(gate), "served"), rank=0)

    other.join()
    if not reads:
        first.join()
    assert answer == "served"
    assert isinstance(outcome[0], WouldDeadlock)
    assert executor.collective_rpc("rank", WAIT) == [0, 1]


@pytest.mark.parametrize("what", ["call", "tell", "drain", "cancel"])
def test_a_signal_handler_in_a_drain_neither_waits_nor_hangs(
    make: Make, gate: Path, handle: Handle, what: str
) -> None:
    executor = make(world_size=1)
    executor.tell("gated", args=(str(gate),))
    last = executor.collective_rpc("rank", non_block=True)
    acts: dict[str, Callable[[], Any]] = {
        "call": lambda: executor.call("rank", rank=0),
        "tell": lambda: executor.tell("rank"),
        "drain": executor.drain,
        "cancel": last.cancel,
    }
    outcome = handle(acts[what])

    def strike() -> None:
        wait_until(lambda: executor._group.plane._pausing)
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(lambda: outcome)
        gate.touch()

    other = start_thread(strike)

    executor.drain(WAIT)

    other.join()
    assert isinstance(outcome[0], WouldDeadlock) is (what in {"call", "drain"})
    assert last.done()
    assert executor.collective_rpc("rank", WAIT) == [0]


def test_a_signal_handler_that_closes_the_executor_does_not_wait_for_its_end(
    make: Make, gate: Path, handle: Handle
) -> None:
    executor = make(world_size=1)
    outcome = handle(executor.close)
    other = start_thread(interrupt, executor, outcome, gate)

    with contextlib.suppress(ExecutorClosed):  # the call may have been answered first
        executor.call("gated", WAIT, args=(str(gate),), rank=0)

    other.join()
    assert outcome == [None]
    with pytest.raises(ExecutorClosed):
        executor.call("echo", WAIT, rank=0)


def run_interrupted(act: Callable[[], object], interrupt: Callable[[], object]) -> None:
    """Run *act* in a thread; *interrupt* at each call that it makes, as a finalizer may be."""

    def between(*_: object) -> None:
        sys.setprofile(None)
        interrupt()
        sys.setprofile(between)

    def run() -> None:
        sys.setprofile(between)
        act()
        sys.setprofile(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WAIT)
    assert not thread.is_alive()


def test_an_actor_may_be_told_something_in_the_middle_of_telling_it_something() -> None:
    received: list[str] = []
    ended = threading.Event()

    class MessageRecorder(ProtectedActor):
        def on_message(self, message: str, /) -> None:
            received.append(message)
            if message == "end":
                self.stop()
                ended.set()

        def failed(self, error: BaseException, /) -> None:
            raise error

    actor = MessageRecorder.start()
    run_interrupted(lambda: actor.tell("outer"), lambda: actor.tell("inner"))

    actor.tell("end")
    assert ended.wait(WAIT)
    assert received.count("outer") == 1
    assert "inner" in received


def test_a_call_may_be_settled_while_its_future_is_being_made() -> None:
    class Settled:
        """A call that is settled as soon as it knows of its future."""

        done = False

        def __setattr__(self, name: str, future: CallFuture) -> None:
            assert name == "future"
            assert not future.is_whole

    nothing: Any = None

    future = CallFuture(Settled(), nothing, nothing)  # type: ignore[arg-type]  # a call as far as is asked

    assert not future.is_whole


def test_callbacks_may_be_handed_over_in_the_middle_of_handing_one_over() -> None:
    callbacks = CallbackThread(lambda _: None)
    ran: list[int] = []
    done = threading.Event()

    def hand_over() -> None:
        callbacks.run(ran.append, 1)
        callbacks.run(done.set)

    run_interrupted(hand_over, lambda: callbacks.run(ran.append, 2))

    assert done.wait(WAIT)
    assert ran.count(1) == 1
    assert 2 in ran
    assert [each.name for each in threading.enumerate()].count("phalanx-callbacks") == 1
    callbacks.close(WAIT)


def test_callbacks_for_which_there_is_no_thread_wait_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    told: list[BaseException] = []
    ran: list[int] = []
    done = threading.Event()
    callbacks = CallbackThread(told.append)
    never = CallbackThread(told.append)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        callbacks.run(ran.append, 1)
        never.run(ran.append, 3)
        never.run(ran.append, 4)
        never.close(WAIT)
    assert ran == [3, 4]
    assert [str(error) for error in told] == ["can't start new thread"] * 3
    callbacks.run(ran.append, 2)
    callbacks.run(done.set)

    assert done.wait(WAIT)
    assert ran == [3, 4, 1, 2]
    callbacks.close(WAIT)


# A Ctrl-C at each step of what a main thread does with an executor. Where it may not strike it
# comes a moment later; then another thread's call shows that no lock is held and no call kept back.
STRUCK = """
import signal, sys, threading, time
from phalanx import Executor, WorkerActor

class Worker(WorkerActor):
    def nothing(self, _=None):
        pass

def strike_in(act, step):
    left, began = step, time.monotonic()
    def look(frame, event, _):
        nonlocal left
        left -= 1
        if left == 0:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)
    try:
        sys.setprofile(look)
        act()
        sys.setprofile(None)
        if left <= 0:
            time.sleep(20)
            sys.exit(f"no Ctrl-C at step {step}")
    except KeyboardInterrupt:
        sys.setprofile(None)
        if time.monotonic() > began + 10:  # not until the sleep was over
            sys.exit(f"a late Ctrl-C at step {step}")
    return left <= 0

def work_on():
    served = []
    def call():
        served.append(executor.collective_rpc("nothing", timeout=20))
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(30)
    assert served == [[None]]

def call_and_cancel():
    executor.collective_rpc("nothing", non_block=True).abandon()

with Executor(Worker, 1, launch={'preload': ()}) as executor:
    for act, stride in (
        (executor.status, 3),
        (lambda: executor.has_room, 1),
        (lambda: executor.tell("nothing"), 3),
        (call_and_cancel, 5),
        (lambda: executor.tell("nothing", args=(bytes(300_000),)), 11),
        (lambda: executor.drain(20), 5),
        (lambda: executor.check_health(20), 29),
    ):
        step = 1
        while strike_in(act, step):
            work_on()
            step += stride
    executor.drain(20)
    assert executor.status().in_flight == 0
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
print("served")
"""


def test_a_ctrl_c_at_any_step_comes_at_once_and_holds_up_no_other_thread() -> None:
    done = run_python("-c", STRUCK)

    assert done.stdout == "served\n", done.stderr


PRESSED_ONCE = """
import signal
from phalanx.actors.signals.interrupts import interrupts, uninterrupted

@uninterrupted
def press():
    signal.raise_signal(signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

interrupts.install()
press()
for seconds in (20, 0.2):
    print(signal.sigtimedwait({signal.SIGINT}, seconds) is not None)
"""


def test_a_ctrl_c_that_had_to_wait_is_sent_once() -> None:
    done = run_python("-c", PRESSED_ONCE)

    assert done.stdout == "True\nFalse\n", done.stderr


PRESSED_WITHOUT_DESCRIPTORS = """
import hashlib, resource, signal, time
from phalanx.actors.signals.interrupts import interrupts, uninterrupted

@uninterrupted
def press():
    signal.raise_signal(signal.SIGINT)
    hashlib.sha256(much)  # no signal is handled meanwhile, and other threads run

much = bytes(1 << 27)
interrupts.install()
usual = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, usual[1]))
try:
    press()
    time.sleep(20)
except KeyboardInterrupt:
    print("came")
finally:
    resource.setrlimit(resource.RLIMIT_NOFILE, usual)
"""


def test_a_ctrl_c_that_had_to_wait_comes_though_no_descriptor_is_free() -> None:
    done = run_python("-c", PRESSED_WITHOUT_DESCRIPTORS)

    assert (done.stdout, done.stderr) == ("came\n", "")


def at(name: str, act: Callable[[], Any]) -> Callable[..., None]:
    """Return a profiler that has *act* done, once, when a function of that *name* is called."""

    def look(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_qualname == name:
            sys.setprofile(None)
            act()

    return look


def test_a_signal_handler_in_the_middle_of_a_start_starts_no_other_and_waits_for_no_end(
    make: Make, handle: Handle
) -> None:
    other = make(world_size=1)

    def act() -> None:
        other.close()  # only asks
        make(world_size=1)

    outcome = handle(act)
    sys.setprofile(at("Runtime.collector", lambda: signal.raise_signal(signal.SIGUSR1)))
    try:
        executor = make(world_size=1)
    finally:
        sys.setprofile(None)

    assert [type(each) for each in outcome] == [WouldDeadlock]
    assert executor.collective_rpc("rank", WAIT) == [0]
    assert other.wait_closed(WAIT)


def test_a_signal_handler_may_not_ask_for_an_outcome_that_its_thread_is_decoding(
    make: Make, handle: Handle
) -> None:
    executor = make(world_size=1)

    def look(values: list[Any], _lead: int) -> list[Any]:
        signal.raise_signal(signal.SIGUSR1)
        return values

    future = executor.collective_rpc("rank", non_block=True, aggregate=look)
    outcome = handle(lambda: future.result(WAIT))

    assert future.result(WAIT) == [0]
    assert [type(each) for each in outcome] == [WouldDeadlock]


@pytest.mark.parametrize("by", ["the handler", "the event loop"])
def test_answers_of_futures_that_a_thread_waits_for_are_read_while_it_is_in_a_signal_handler(
    make: Make, gate: Path, handle: Handle, by: str
) -> None:
    executor = make(world_size=1)
    future = executor.call("gated", args=(str(gate),), non_block=True, rank=0)

    def act() -> Any:
        gate.touch()
        if by == "the event loop":
            wait_until(future.done)
        return executor.call("rank", WAIT, rank=0)

    outcome = handle(act)
    # Under the lock of the event that `concurrent.futures` waits for.
    sys.setprofile(at("Condition.wait", lambda: signal.raise_signal(signal.SIGUSR1)))
    try:
        done, _ = concurrent.futures.wait([future], WAIT)
    finally:
        sys.setprofile(None)

    assert done == {future}
    assert outcome == [0]


def test_a_finalizer_under_a_lock_of_the_library_gets_an_error(make: Make) -> None:
    one, two = make(world_size=1), make(world_size=1)

    with one._group.plane.lock.asked(), pytest.raises(WouldDeadlock):
        two.tell("rank")  # another group's
    assert two.collective_rpc("rank", WAIT) == [0]

    with two._group.changed:  # the actor takes it under the plane's lock
        with pytest.raises(WouldDeadlock):
            two.tell("rank")
        two.close()  # only asks
    assert two.wait_closed(WAIT)


def test_who_collects_a_forgotten_executor_does_not_wait_for_its_end(
    make: Make, gate: Path
) -> None:
    executor = make(world_size=1)
    future = executor.call("gated", args=(str(gate),), non_block=True, rank=0)
    shared = executor._group

    executor._finalizer()

    assert not shared.gone.is_set()  # its rank is busy
    gate.touch()
    assert shared.gone.wait(WAIT)
    assert future.done()


def test_a_finalizer_that_comes_when_everything_has_ended_does_nothing(make: Make) -> None:
    one = make(world_size=1)
    with Runtime(console=None) as runtime:
        ended = Executor(Echo, 1, launch=Launch(preload=()), runtime=runtime)
        ended.close()

    with one._group.plane.lock.asked():
        ended._group.request_close()
        ended._group.kill()


SIGTERM = """
import os, signal, time
from phalanx.actors.signals.driver_exit import open_executors

class Raises:
    def end(self, *, drains):
        raise OSError("no thread")

open_executors.add(Raises())
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(50)
"""


def test_sigterm_ends_a_program_whose_executors_cannot_be_ended() -> None:
    done = run_python("-c", SIGTERM, timeout=40)

    assert done.returncode == -signal.SIGTERM


def test_an_exception_thrown_in_at_the_end_of_a_wait_lets_others_read_and_its_thread_call_again(
    make: Make,
) -> None:
    executor = make(world_size=1)

    def throw() -> None:
        raise KeyError("thrown in")

    sys.setprofile(at("Reader._exit", throw))
    try:
        with pytest.raises(KeyError, match="thrown in"):
            executor.call("rank", WAIT, rank=0)
    finally:
        sys.setprofile(None)

    assert executor.call("rank", WAIT, rank=0) == 0
    assert not executor._group.plane._reader.is_mine()


# `multiprocessing` ends the children of a pool by SIGTERM, and waits for them.
# It is forked in the middle of the start of another executor.
FORKED = """
import os, signal
import phalanx.runtime.runtime as shared
from phalanx import Executor
from phalanx.runtime import descriptor_limit
from tests.support.workers import Echo

with Executor(Echo, 1, launch={'preload': ()}), shared._guard, descriptor_limit._lock:
    child = os.fork()
    if not child:
        signal.alarm(30)
        ours = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        held = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        with Executor(Echo, 1, launch={'preload': ()}) as executor:
            works = executor.collective_rpc("rank", 20) == [0]
        is_python = ours == (signal.SIG_DFL, signal.default_int_handler)
        os._exit(not (is_python and works) or bool(held))
    print(os.waitpid(child, 0)[1], signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""


def test_a_forked_child_has_no_handler_of_its_parents_executors_and_builds_its_own() -> None:
    done = run_python("-c", FORKED)

    assert done.stdout == "0 set()\n", done.stderr


# What has arrived lies in memory of the parent, or in files that the child has not; and another
# thread may have had a lock when it forked.
OUTCOMES = """
import asyncio, os, signal, threading
from phalanx import Executor
from phalanx.errors import ExecutorClosed
from tests.support.workers import Echo

LARGE = bytes(range(256)) * 4000

async def awaited():
    await executor.aio.call("rank", rank=0)

def refused(act):
    try:
        act()
    except ExecutorClosed:
        return True

with Executor(Echo, 1, launch={'preload': ()}) as executor:
    future = executor.call("echo", args=(LARGE,), rank=0, non_block=True)
    stream = executor.stream("echo", args=([LARGE, LARGE],), rank=0)
    executor.call("rank", 20, rank=0)  # behind both
    held, forked = threading.Event(), threading.Event()
    def hold():
        with executor._group.plane.lock.unasked:
            held.set()
            forked.wait()
    threading.Thread(target=hold).start()
    held.wait()
    child = os.fork()
    if not child:
        signal.alarm(30)
        outcomes = future.result, future.exception, lambda: next(stream)
        others = executor.status, executor.wait_closed, lambda: asyncio.run(awaited())
        fails = [refused(act) for act in (*outcomes, *others)]
        ends = [future.cancel(), future.abandon(), stream.close()]
        ends += [executor.close(), executor.kill(), executor.request_close()]
        assert (fails, ends) == ([True] * 6, [False] * 2 + [None] * 4), (fails, ends)
        assert "serving" in repr(executor)
        os._exit(0)
    forked.set()
    print(os.waitpid(child, 0)[1], future.result() == LARGE, list(stream) == [LARGE] * 2)
"""


def test_a_forked_child_gets_no_outcome_of_its_parents_calls_and_ends_nothing() -> None:
    done = run_python("-c", OUTCOMES)

    assert done.stdout == "0 True True\n", done.stderr


# An exception at each step of making a call at which the interpreter throws one in that another
# thread has set: after a call of a function in C, at the begin of one in Python.
THROWN_AT = """
import sys
from phalanx import CheckpointPolicy, Executor
from tests.support.workers import Echo

class Thrown(BaseException):
    pass

class Saved(Echo):
    saved = ()
    called = 0
    def noted(self, saves):
        self.called += 1
    def checkpoint(self):
        self.saved += (self.called,)
        return self.called
    def restore(self, called):
        self.called = called
    def both(self):
        return self.called, self.saved

def throws(act, step):
    left = step
    def look(frame, event, _):
        nonlocal left
        if event in ("call", "c_return"):
            left -= 1
            if left == 0:
                sys.setprofile(None)
                raise Thrown
    try:
        sys.setprofile(look)
        act()
        return False
    except Thrown:
        return True
    finally:
        sys.setprofile(None)

def many():
    for n in range(40):  # some are sent together
        executor.collective_rpc("echo", args=(n,), non_block=True)

with Executor(Echo, 2, launch={'preload': ()}) as executor:
    for act, stride in (
        (lambda: executor.collective_rpc("echo", args=(1,), non_block=True), 1),
        (lambda: executor.collective_rpc("echo", args=(bytes(300_000),), non_block=True), 5),
        (lambda: executor.call("echo", args=(1,), rank=1, non_block=True), 1),
        (lambda: executor.submit("echo", args=(1,)), 1),
        (lambda: executor.tell("echo", args=(1,)), 1),
        (many, 11),
    ):
        step = 1
        while throws(act, step):
            assert executor.collective_rpc("echo", args=(step,), timeout=20) == [step] * 2
            executor.drain(20)
            step += stride
        assert step > 30
        executor.drain(20)
    assert executor.status().in_flight == 0

policy = CheckpointPolicy(every_calls=2)
with Executor(Saved, 2, launch={'preload': ()}, checkpoint=policy) as executor:
    step = 1
    while throws(lambda: executor.collective_rpc("noted", args=(1,), non_block=True), step):
        one, other = executor.collective_rpc("both", timeout=20)
        assert one == other, (step, one, other)
        step += 1
    assert step > 30
print("served")
"""


def test_a_call_that_an_exception_interrupts_at_any_step_reaches_every_rank_or_none() -> None:
    done = run_python("-c", THROWN_AT)

    assert done.stdout == "served\n", done.stderr


# As a watchdog does, or a signal handler that raises. No call has a timeout: one whose answer was
# lost would wait for ever.
THROWN_INTO = """
import ctypes, random, threading, time
from phalanx import Executor
from tests.support.workers import Echo

class Thrown(BaseException):
    pass

wrong = []
calls = [0] * 4
enough = threading.Event()

def work(me):
    while not enough.is_set():
        try:
            calls[me] += 1
            value = (me, calls[me])
            if executor.collective_rpc("echo", args=(value,)) != [value] * 2:
                wrong.append(value)
            if executor.call("echo", args=(value,), rank=me % 2) != value:
                wrong.append(value)
            futures = [executor.collective_rpc("echo", args=(n,), non_block=True) for n in range(5)]
            if [future.result() for future in futures] != [[n] * 2 for n in range(5)]:
                wrong.append(value)
            if executor.submit("echo", args=(value,)).result() != value:
                wrong.append(value)
        except Thrown:
            pass

def keep_on(me):
    while not enough.is_set():
        try:
            work(me)
        except Thrown:
            pass

rng = random.Random(1)
with Executor(Echo, 2, launch={'preload': ()}) as executor:
    threads = [threading.Thread(target=keep_on, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        time.sleep(rng.uniform(0.0, 0.01))
        victim = rng.choice([thread.ident for thread in threads if thread.is_alive()])
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(victim), ctypes.py_object(Thrown))
    enough.set()
    for thread in threads:
        thread.join()
    executor.drain()
    print(wrong, executor.collective_rpc("echo", args=("still there",)))
"""


def test_an_exception_thrown_into_a_thread_that_reads_loses_no_answer() -> None:
    done = run_python("-c", THROWN_INTO)

    assert done.stdout == "[] ['still there', 'still there']\n", done.stderr
