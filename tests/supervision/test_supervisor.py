# pyright: reportPrivateUsage=false
# Some tests wait for what lies in a supervisor; users need not.
"""The supervisor as an actor, over threads, Pykka actors, processes and other supervisors."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pykka
import pytest

from phalanx.supervision import (
    BRUTAL_KILL,
    IGNORE,
    KILLED,
    NORMAL,
    BackOff,
    CallbackFailed,
    ChildExited,
    ChildLost,
    ChildRefused,
    ChildSpec,
    ChildStarted,
    Decider,
    Directive,
    Down,
    ExitKind,
    ExitReason,
    HandleFailed,
    Intensity,
    Notice,
    Restart,
    Rule,
    SpecError,
    StartFailed,
    Supervisor,
    SupervisorDown,
    SupervisorGaveUp,
    SupervisorSpec,
    WouldDeadlock,
    link,
    pykka_child,
    thread_child,
)

LIMIT = 10.0
CRASH = ExitReason(ExitKind.CRASH)

pytestmark = pytest.mark.usefixtures("leak_check")


class Notices:
    """What a tree said, to be waited for."""

    def __init__(self) -> None:
        self.seen: list[Notice] = []
        self._changed = threading.Condition()

    def __call__(self, notice: Notice) -> None:
        with self._changed:
            self.seen.append(notice)
            self._changed.notify_all()

    def wait(self, wanted: Callable[[Notice], bool], count: int = 1) -> Notice:
        with self._changed:
            assert self._changed.wait_for(lambda: self._found(wanted) >= count, LIMIT), self.seen
        return [notice for notice in self.seen if wanted(notice)][count - 1]

    def _found(self, wanted: Callable[[Notice], bool]) -> int:
        return sum(map(wanted, self.seen))

    def wait_started(self, path: str, incarnation: int) -> None:
        self.wait(
            lambda n: isinstance(n, ChildStarted) and (n.path, n.incarnation) == (path, incarnation)
        )


@pytest.fixture
def notices() -> Notices:
    return Notices()


class Echo(pykka.ThreadingActor):
    """Answers what it is sent; raises what is an exception."""

    def on_receive(self, message: Any) -> Any:
        if isinstance(message, BaseException):
            raise message
        return message


class Puppet:
    """A child whose every move the test makes."""

    def __init__(self) -> None:
        self.contexts: SimpleQueue[Any] = SimpleQueue()
        self.told: SimpleQueue[str] = SimpleQueue()
        self.answers = True  # ends when it is asked to

    def __call__(self, ctx: Any) -> Any:
        self.ctx = ctx
        self.contexts.put(ctx)
        return self

    def terminate(self, reason: ExitReason) -> None:
        self.told.put("terminate")
        if self.answers:
            self.ctx.exited(ExitReason(ExitKind.SHUTDOWN))

    def kill(self) -> None:
        self.told.put("kill")
        self.ctx.exited(KILLED)


def wait_stop(stop: threading.Event) -> None:
    stop.wait()


def tree(*children: ChildSpec | SupervisorSpec, **options: Any) -> SupervisorSpec:
    return SupervisorSpec("top", children=children, intensity=Intensity(5, 60.0), **options)


def in_sub_process(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


# --- children of every kind ---------------------------------------------------------------


def test_a_crashed_actor_is_replaced_and_the_others_go_on(notices: Notices) -> None:
    spec = tree(ChildSpec("a", Echo.start), ChildSpec("b", pykka_child(Echo)))
    with Supervisor(spec, subscriber=notices) as top:
        first, other = top.child("a"), top.child("b")

        first.tell(ValueError("boom"))

        notices.wait_started("top/a", 2)
        assert top.child("a") is not first
        assert top.child("a").ask("hello", timeout=LIMIT) == "hello"
        assert top.child("b") is other


def test_an_exception_that_was_answered_leaves_an_actor_alive_as_in_pykka() -> None:
    with Supervisor(tree(ChildSpec("a", Echo.start))) as top:
        with pytest.raises(ValueError, match="boom"):
            top.child("a").ask(ValueError("boom"), timeout=LIMIT)

        assert top.child("a").ask(1, timeout=LIMIT) == 1
        assert top.snapshot().children[0].incarnation == 1


def test_system_exit_in_one_actor_stops_no_other(notices: Notices) -> None:
    bystander = Echo.start()
    spec = tree(ChildSpec("a", Echo.start), ChildSpec("b", Echo.start))
    with Supervisor(spec, subscriber=notices) as top:
        with pytest.raises(SystemExit):
            top.child("a").ask(SystemExit(3), timeout=LIMIT)

        notices.wait_started("top/a", 2)
        assert top.child("b").ask("still here", timeout=LIMIT) == "still here"
        assert bystander.ask("me too", timeout=LIMIT) == "me too"
    bystander.stop()


def test_a_thread_that_raises_is_replaced_and_its_reason_told(notices: Notices) -> None:
    go = threading.Event()

    def work(stop: threading.Event) -> None:
        if not go.is_set():
            go.set()
            raise RuntimeError("first time")
        stop.wait()

    with Supervisor(tree(ChildSpec("a", thread_child(work))), subscriber=notices):
        exited = notices.wait(lambda n: isinstance(n, ChildExited))
        notices.wait_started("top/a", 2)

    assert isinstance(exited, ChildExited)
    assert exited.reason == ExitReason(ExitKind.CRASH, "RuntimeError: first time")
    assert exited.decision == "restart 1 of 5 in 60 s"


def test_a_real_process_that_is_killed_is_replaced(notices: Notices) -> None:
    class ProcessChild:
        def __init__(self, ctx: Any) -> None:
            code = "import sys; sys.stdin.read()"
            self.ref = subprocess.Popen([sys.executable, "-S", "-E", "-c", code], stdin=-1)
            self.ctx = ctx
            threading.Thread(target=self._wait, daemon=True).start()

        def _wait(self) -> None:
            code = self.ref.wait()
            assert self.ref.stdin is not None
            self.ref.stdin.close()
            kind = {0: ExitKind.NORMAL, -signal.SIGKILL: ExitKind.KILLED}.get(code, ExitKind.CRASH)
            self.ctx.exited(ExitReason(kind))

        def terminate(self, reason: ExitReason) -> None:
            self.ref.terminate()

        def kill(self) -> None:
            self.ref.kill()

    with Supervisor(tree(ChildSpec("p", ProcessChild)), subscriber=notices) as top:
        first = top.child("p")

        os.kill(first.pid, signal.SIGKILL)

        notices.wait_started("top/p", 2)
        assert top.child("p").pid != first.pid


def test_a_nested_supervisor_that_gives_up_is_restarted_by_its_parent(notices: Notices) -> None:
    sub = SupervisorSpec("sub", intensity=Intensity(0), children=[ChildSpec("a", Echo.start)])
    with Supervisor(tree(sub), subscriber=notices) as top:
        top.child("sub/a").tell(ValueError("boom"))

        gave_up = notices.wait(lambda n: isinstance(n, SupervisorGaveUp))
        notices.wait_started("top/sub", 2)
        assert top.child("sub/a").ask(1, timeout=LIMIT) == 1

    assert isinstance(gave_up, SupervisorGaveUp)
    assert (gave_up.path, gave_up.child) == ("top/sub", "a")


# --- starts and stops that go wrong -------------------------------------------------------


def test_a_failed_start_stops_what_had_started_and_raises_with_the_cause() -> None:
    puppet = Puppet()

    def bad(ctx: Any) -> Any:
        raise OSError("no such device")

    with pytest.raises(StartFailed, match="no such device") as caught:
        Supervisor(tree(ChildSpec("a", puppet), ChildSpec("b", bad)))

    assert isinstance(caught.value.__cause__, OSError)
    assert puppet.told.get(timeout=LIMIT) == "terminate"


@pytest.mark.parametrize("nonsense", [None, 5, "handle"])
def test_a_start_function_that_returns_nonsense_has_failed(nonsense: object) -> None:
    def start(ctx: Any) -> Any:
        return nonsense

    with pytest.raises(StartFailed, match="top/a: start returned"):
        Supervisor(tree(ChildSpec("a", start)))


def test_an_ignored_child_is_kept_and_can_be_started_later() -> None:
    puppet, ready = Puppet(), threading.Event()

    def start(ctx: Any) -> Any:
        return puppet(ctx) if ready.is_set() else IGNORE

    with Supervisor(tree(ChildSpec("a", start))) as top:
        assert top.count_children().active == 0
        with pytest.raises(ChildRefused, match="not_running"):
            top.child("a")
        assert top.restart_child("a") is False
        ready.set()

        assert top.restart_child("a") is True

        assert top.child("a") is puppet


def test_a_hanging_start_fails_at_its_deadline_and_what_it_brings_later_is_killed() -> None:
    release, late = threading.Event(), Puppet()

    def hang(ctx: Any) -> Any:
        release.wait()
        return late(ctx)

    with pytest.raises(StartFailed, match="not started within 0.05 s"):
        Supervisor(tree(ChildSpec("a", hang, start_within=0.05)))
    release.set()

    assert late.told.get(timeout=LIMIT) == "kill"


def test_a_child_that_does_not_stop_is_killed_at_its_deadline() -> None:
    puppet = Puppet()
    puppet.answers = False
    top = Supervisor(tree(ChildSpec("a", puppet, shutdown=0.05)))

    top.stop(timeout=LIMIT)

    assert [puppet.told.get(timeout=LIMIT) for _ in range(2)] == ["terminate", "kill"]


def test_a_thread_that_never_stops_is_reported_lost_and_the_tree_ends(notices: Notices) -> None:
    release = threading.Event()

    def deaf(stop: threading.Event) -> None:
        release.wait()

    spec = ChildSpec("a", thread_child(deaf), shutdown=0.05, kill_within=0.0)
    top = Supervisor(tree(spec), subscriber=notices)

    top.stop(timeout=LIMIT)

    assert [n.path for n in notices.seen if isinstance(n, ChildLost)] == ["top/a"]
    release.set()


def test_brutal_kill_of_what_nothing_can_kill_is_refused() -> None:
    for start in (Echo.start, pykka_child(Echo), thread_child(wait_stop)):
        with pytest.raises(SpecError, match="nothing can kill") as caught:
            ChildSpec("a", start, shutdown=BRUTAL_KILL)

        assert caught.value.field == "shutdown"


@pytest.mark.parametrize("error", [RuntimeError("bad handle"), SystemExit(3)], ids=repr)
def test_a_handle_that_raises_costs_its_siblings_nothing(
    error: BaseException, notices: Notices
) -> None:
    class Bad(Puppet):
        def terminate(self, reason: ExitReason) -> None:
            raise error

    good, bad = Puppet(), Bad()
    spec = tree(ChildSpec("good", good), ChildSpec("bad", bad, shutdown=0.05))
    top = Supervisor(spec, subscriber=notices)

    top.stop(timeout=LIMIT)

    assert [n.error for n in notices.seen if isinstance(n, HandleFailed)] == [repr(error)]
    assert bad.told.get(timeout=LIMIT) == "kill"
    assert good.told.get(timeout=LIMIT) == "terminate"


def test_a_supervisor_that_fails_itself_stops_its_children_and_tells_its_parent(
    notices: Notices,
) -> None:
    armed = threading.Event()

    class Clockwork:
        def call_at(self, at: float, callback: Callable[[], None]) -> Callable[[], None]:
            if armed.is_set():
                armed.clear()
                raise MemoryError("in the timers")
            return lambda: None

    puppet, bystander = Puppet(), Puppet()
    sub = SupervisorSpec("sub", children=[ChildSpec("a", puppet), ChildSpec("b", bystander)])
    with Supervisor(tree(sub), subscriber=notices, timers=Clockwork()):
        armed.set()
        puppet.contexts.get(timeout=LIMIT).exited(CRASH)

        notices.wait_started("top/sub", 2)
        assert bystander.told.get(timeout=LIMIT) == "kill"

    exits = [n for n in notices.seen if isinstance(n, ChildExited) and n.path == "top/sub"]
    assert exits[0].reason.kind is ExitKind.CRASH
    assert "MemoryError" in exits[0].reason.detail


def test_a_killed_supervisor_kills_its_children_without_asking() -> None:
    puppet = Puppet()
    top = Supervisor(tree(ChildSpec("a", puppet)))

    top.kill()

    assert puppet.told.get(timeout=LIMIT) == "kill"
    assert top.wait_ended(LIMIT) == KILLED


# --- requests -----------------------------------------------------------------------------


def test_children_are_added_stopped_started_and_deleted() -> None:
    with Supervisor(tree(ChildSpec("a", Echo.start))) as top:
        assert top.start_child(ChildSpec("b", thread_child(wait_stop)), timeout=LIMIT) == "b"
        with pytest.raises(ChildRefused, match="already_started"):
            top.start_child(ChildSpec("b", Echo.start))
        with pytest.raises(ChildRefused, match="running"):
            top.delete_child("b")
        top.terminate_child("b")
        assert [(row.key, row.shown) for row in top.which_children()] == [
            ("b", "undefined"),
            ("a", "running"),
        ]
        assert top.restart_child("b") is True
        assert top.get_childspec("b").shutdown == 5.0
        top.terminate_child("b")
        top.delete_child("b")
        with pytest.raises(ChildRefused, match="not_found") as caught:
            top.terminate_child("b")

    assert caught.value.child == "b"


def test_instances_are_numbered_and_a_number_is_never_used_twice() -> None:
    pool = SupervisorSpec(
        "pool", "simple_one_for_one", children=[ChildSpec("w", pykka_child(Echo))]
    )
    with Supervisor(tree(pool)) as top:
        view = top.supervisor("pool")
        assert [view.start_child(), view.start_child()] == ["w#1", "w#2"]

        top.terminate_child("pool")
        top.restart_child("pool")

        assert view.start_child() == "w#3"
        assert view.count_children().active == 1


def test_a_failed_start_child_raises_the_cause_and_keeps_nothing() -> None:
    def bad(ctx: Any) -> Any:
        raise OSError("no")

    with Supervisor(tree()) as top:
        with pytest.raises(StartFailed) as caught:
            top.start_child(ChildSpec("a", bad))

        assert isinstance(caught.value.__cause__, OSError)
        assert top.which_children() == ()


def test_a_significant_child_where_nothing_is_is_refused() -> None:
    with Supervisor(tree()) as top, pytest.raises(SpecError, match="auto_shutdown"):
        top.start_child(ChildSpec("a", Echo.start, restart=Restart.TRANSIENT, significant=True))


def test_requests_to_an_ended_supervisor_raise_at_once() -> None:
    top = Supervisor(tree())
    top.stop()

    with pytest.raises(SupervisorDown):
        top.which_children()


def test_a_request_during_a_long_start_times_out_and_is_answered_later() -> None:
    release, starting, puppet = threading.Event(), threading.Event(), Puppet()

    def slow(ctx: Any) -> Any:
        starting.set()
        release.wait()
        return puppet(ctx)

    with Supervisor(tree()) as top:
        adding = threading.Thread(target=lambda: top.start_child(ChildSpec("a", slow)))
        adding.start()
        starting.wait(LIMIT)
        with pytest.raises(TimeoutError):
            top.which_children(timeout=0.05)
        release.set()
        adding.join(LIMIT)

        assert len(top.which_children(timeout=LIMIT)) == 1


def ask_in_thread(ask: Callable[[], object]) -> SimpleQueue[object]:
    answers: SimpleQueue[object] = SimpleQueue()

    def run() -> None:
        try:
            answers.put(ask())
        except Exception as error:  # whatever it is, it is the answer
            answers.put(error)

    threading.Thread(target=run, daemon=True).start()
    return answers


def wait_request(top: Supervisor, is_there: Callable[[Any], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not is_there(top._top.state):
        assert time.monotonic() < deadline, top._top.state
        top._top.actor_ref.proxy().thread.get(timeout=LIMIT)  # one more turn of its loop


def test_callers_are_answered_when_the_supervisor_is_killed_under_them() -> None:
    going, go_on = threading.Event(), threading.Event()

    def slow(_: Any) -> Any:
        going.set()
        go_on.wait(LIMIT)
        return IGNORE

    top = Supervisor(tree())
    in_task = ask_in_thread(lambda: top.start_child(ChildSpec("slow", slow)))
    assert going.wait(LIMIT)
    in_mailbox = ask_in_thread(top.count_children)
    wait_request(top, lambda state: bool(state.mailbox))

    top.kill()

    assert isinstance(in_task.get(timeout=LIMIT), SupervisorDown)
    assert isinstance(in_mailbox.get(timeout=LIMIT), SupervisorDown)
    go_on.set()


def test_callers_are_answered_when_the_supervisor_fails(
    notices: Notices, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = Supervisor(tree(), subscriber=notices)

    def broken(*_: object) -> Any:
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr("phalanx.supervision.actor.decide", broken)
    answer = ask_in_thread(top.count_children)

    assert isinstance(answer.get(timeout=LIMIT), SupervisorDown)
    reason = top.wait_ended(LIMIT)
    assert reason is not None
    assert "a bug of ours" in reason.detail
    top.stop()


def test_asking_from_the_supervisor_itself_raises_instead_of_waiting_for_ever() -> None:
    errors: SimpleQueue[BaseException] = SimpleQueue()

    def ask(notice: Notice) -> None:
        if isinstance(notice, ChildExited):
            try:
                top.which_children()
            except WouldDeadlock as error:
                errors.put(error)

    puppet = Puppet()
    with Supervisor(tree(ChildSpec("a", puppet)), subscriber=ask) as top:
        puppet.contexts.get(timeout=LIMIT).exited(NORMAL)

        assert "itself" in str(errors.get(timeout=LIMIT))


def test_stopping_twice_and_from_two_threads_is_harmless() -> None:
    top = Supervisor(tree(ChildSpec("a", Echo.start)))
    threads = [threading.Thread(target=top.stop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)

    top.stop()

    assert top.reason is not None


# --- beyond OTP ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("directive", "incarnation", "state"),
    [
        (Directive.RESUME, 1, "running"),
        (Directive.RESTART, 2, "running"),
        (Directive.STOP, 1, "undefined"),
    ],
)
def test_the_caller_gets_its_exception_and_the_decider_says_what_follows(
    notices: Notices, directive: Directive, incarnation: int, state: str
) -> None:
    spec = tree(ChildSpec("a", Echo.start), decider=Decider((Rule(KeyError, directive),)))
    with Supervisor(spec, subscriber=notices) as top:
        with pytest.raises(KeyError):
            top.child("a").ask(KeyError("k"), timeout=LIMIT)

        if directive is not Directive.RESUME:
            notices.wait(lambda n: isinstance(n, ChildExited))
        if directive is Directive.RESTART:
            notices.wait_started("top/a", 2)
        top.which_children(timeout=LIMIT)
        (child,) = top.snapshot().children
        assert (child.incarnation, child.state) == (incarnation, state)


def test_escalate_gives_up_at_once(notices: Notices) -> None:
    spec = tree(
        ChildSpec("a", Echo.start), decider=Decider((Rule(ExitKind.CRASH, Directive.ESCALATE),))
    )
    top = Supervisor(spec, subscriber=notices)

    top.child("a").tell(ValueError("boom"))

    reason = top.wait_ended(LIMIT)
    assert reason is not None
    assert reason.detail == "gave up: escalated by the decider"
    top.stop()


def test_back_off_waits_before_a_restart_and_a_stop_does_not_wait_for_it(notices: Notices) -> None:
    spec = tree(ChildSpec("a", Echo.start), backoff=BackOff(60.0, maximum=60.0))
    with Supervisor(spec, subscriber=notices) as top:
        top.child("a").tell(ValueError("boom"))

        notices.wait(lambda n: isinstance(n, ChildExited))
        assert [row.shown for row in top.which_children(timeout=LIMIT)] == ["restarting"]
    assert not [n for n in notices.seen if isinstance(n, ChildStarted) and n.incarnation == 2]


def test_a_short_back_off_ends_in_a_restart(notices: Notices) -> None:
    spec = tree(ChildSpec("a", Echo.start), backoff=BackOff(0.01, maximum=0.05))
    with Supervisor(spec, subscriber=notices) as top:
        for incarnation in (2, 3, 4):
            top.child("a").tell(ValueError("boom"))
            notices.wait_started("top/a", incarnation)


def test_restarts_of_no_use_end_early_and_progress_resets_the_count() -> None:
    puppet = Puppet()
    top = Supervisor(tree(ChildSpec("a", puppet), fruitless_limit=2))

    puppet.contexts.get(timeout=LIMIT).exited(CRASH)
    second = puppet.contexts.get(timeout=LIMIT)
    second.progressed()
    second.exited(CRASH)
    for _ in range(2):
        puppet.contexts.get(timeout=LIMIT).exited(CRASH)

    reason = top.wait_ended(LIMIT)
    assert reason is not None
    assert "was restarted 2 times in a row and was of no use" in reason.detail
    top.stop()


def test_a_preemption_does_not_count_where_the_spec_says_so() -> None:
    puppet = Puppet()
    spec = SupervisorSpec(
        "top", intensity=Intensity(0), children=[ChildSpec("a", puppet)], count_preemption=False
    )
    with Supervisor(spec) as top:
        for _ in range(3):
            ctx = puppet.contexts.get(timeout=LIMIT)
            ctx.exited(ExitReason(ExitKind.CRASH, signal=signal.SIGTERM))

        puppet.contexts.get(timeout=LIMIT)
        assert top.snapshot().restarts == 0


def test_a_monitor_is_told_once_with_the_reason_also_afterwards() -> None:
    told: SimpleQueue[Down] = SimpleQueue()
    with Supervisor(tree(ChildSpec("a", Echo.start, restart=Restart.TEMPORARY))) as top:
        line = top.lifeline("a")
        cancel = line.monitor(lambda down: pytest.fail("it was cancelled"))
        line.monitor(told.put)
        cancel()

        top.child("a").tell(ValueError("boom"))

        down = told.get(timeout=LIMIT)
        assert (down.path, down.reason.kind) == ("top/a", ExitKind.CRASH)
    line.monitor(told.put)
    assert told.get(timeout=LIMIT).reason == down.reason
    assert told.empty()


@pytest.mark.parametrize(
    "reason",
    [CRASH, KILLED, ExitReason(ExitKind.SHUTDOWN), ExitReason(ExitKind.SHUTDOWN, "term")],
    ids=str,
)
def test_every_reason_but_normal_crosses_a_link_unchanged(
    reason: ExitReason, notices: Notices
) -> None:
    a = Puppet()
    spec = tree(ChildSpec("a", a), ChildSpec("b", thread_child(wait_stop)))
    with Supervisor(spec, subscriber=notices) as top:
        b = top.child("b")
        link(top.lifeline("a"), top.lifeline("b"))
        a.contexts.get(timeout=LIMIT).exited(NORMAL)
        notices.wait_started("top/a", 2)
        assert not b.is_set()

        link(top.lifeline("a"), top.lifeline("b"))
        a.contexts.get(timeout=LIMIT).exited(reason)

        notices.wait_started("top/b", 2)
        exits = [n for n in notices.seen if isinstance(n, ChildExited) and n.path == "top/b"]
        assert exits[0].reason == reason


def test_a_linked_actor_ends_with_the_failure_of_the_other(notices: Notices) -> None:
    spec = tree(ChildSpec("a", Echo.start), ChildSpec("b", Echo.start))
    with Supervisor(spec, subscriber=notices) as top:
        link(top.lifeline("a"), top.lifeline("b"))

        top.child("a").tell(ValueError("boom"))

        notices.wait_started("top/b", 2)
        exits = [n for n in notices.seen if isinstance(n, ChildExited) and n.path == "top/b"]
        assert exits[0].reason == ExitReason(ExitKind.CRASH, "ValueError: boom")


@pytest.mark.parametrize("error", [ValueError("bad watcher"), SystemExit(5)], ids=repr)
def test_a_watcher_that_raises_costs_nobody_the_news(
    error: BaseException, notices: Notices
) -> None:
    def bad(_: Down) -> None:
        raise error

    puppet = Puppet()
    told: SimpleQueue[Down] = SimpleQueue()
    with Supervisor(tree(ChildSpec("a", puppet)), subscriber=notices) as top:
        top.monitor("a", bad)
        top.monitor("a", told.put)

        puppet.contexts.get(timeout=LIMIT).exited(CRASH)

        notices.wait_started("top/a", 2)
        assert told.get(timeout=LIMIT).reason == CRASH
        failed = notices.wait(lambda n: isinstance(n, CallbackFailed))
        assert isinstance(failed, CallbackFailed)
        assert (failed.path, failed.callback, failed.error) == ("top/a", "monitor", repr(error))


@pytest.mark.parametrize("child", ["thread", "actor", "puppet"])
def test_a_predicate_that_raises_says_nothing_and_costs_no_exit(
    child: str, notices: Notices
) -> None:
    go = threading.Event()

    def bad(_: object) -> bool:
        raise KeyError("bad predicate")

    def work(stop: threading.Event) -> None:
        if not go.is_set():
            go.set()
            raise RuntimeError("boom")
        stop.wait()

    puppet = Puppet()
    start: Any = {"thread": thread_child(work), "actor": Echo.start, "puppet": puppet}[child]
    spec = tree(ChildSpec("a", start), decider=Decider((Rule(bad, Directive.ESCALATE),)))
    with Supervisor(spec, subscriber=notices) as top:
        if child == "actor":
            top.child("a").tell(ValueError("boom"))
        elif child == "puppet":
            puppet.contexts.get(timeout=LIMIT).exited(CRASH)

        notices.wait_started("top/a", 2)
        failed = notices.wait(lambda n: isinstance(n, CallbackFailed))
        assert isinstance(failed, CallbackFailed)
        assert (failed.path, failed.callback) == ("top/a", "decider")


def test_an_exception_that_cannot_be_shown_costs_no_exit(notices: Notices) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

        __repr__ = __str__

    def work(_: threading.Event) -> None:
        raise Mute

    with Supervisor(tree(ChildSpec("a", thread_child(work))), subscriber=notices):
        notices.wait_started("top/a", 2)


def test_a_trapping_side_is_told_and_not_stopped() -> None:
    told: SimpleQueue[Down] = SimpleQueue()
    a, b = Puppet(), Puppet()
    with Supervisor(tree(ChildSpec("a", a), ChildSpec("b", b))) as top:
        link(top.lifeline("a"), top.lifeline("b"), on_down=told.put)

        a.contexts.get(timeout=LIMIT).exited(CRASH)

        assert told.get(timeout=LIMIT).path == "top/a"
        assert b.told.empty()


def test_the_tree_is_shown_as_text_with_what_happened(notices: Notices) -> None:
    sub = SupervisorSpec("sub", "rest_for_one", children=[ChildSpec("x", thread_child(wait_stop))])
    with Supervisor(tree(ChildSpec("a", Echo.start), sub), subscriber=notices) as top:
        top.child("a").tell(ValueError("boom"))
        notices.wait_started("top/a", 2)
        top.which_children(timeout=LIMIT)

        text = top.render()

    assert text.splitlines() == [
        "top  [one_for_one, 1 of 5 restarts in 60 s]",
        "├─ a  permanent, running, incarnation 2, last exit: crash (ValueError: boom)",
        "└─ sub  permanent, running, [rest_for_one, 0 of 1 restarts in 5 s]",
        "   └─ x  permanent, running",
    ]


def test_a_deep_tree_is_shown() -> None:
    depth = 100
    spec = SupervisorSpec(f"s{depth}")
    for i in reversed(range(depth)):
        spec = SupervisorSpec(f"s{i}", children=[spec])
    with Supervisor(spec) as top:
        limit = sys.getrecursionlimit()
        frames = len(inspect.stack(0))
        sys.setrecursionlimit(frames + 60)
        try:
            text = top.render()
        finally:
            sys.setrecursionlimit(limit)

    assert len(text.splitlines()) == depth + 1


@pytest.mark.parametrize("error", [RuntimeError("bad"), SystemExit(4)], ids=repr)
def test_a_subscriber_that_raises_harms_nobody(error: BaseException, notices: Notices) -> None:
    with Supervisor(tree(ChildSpec("a", Echo.start))) as top:

        def bad(notice: Notice) -> None:
            raise error

        top.subscribe(bad)
        top.subscribe(notices)

        top.child("a").tell(ValueError("boom"))

        notices.wait_started("top/a", 2)


# --- the program around it ----------------------------------------------------------------


def test_a_program_that_forgets_to_stop_its_tree_ends_and_stops_it() -> None:
    done = in_sub_process("""
        import pykka
        from phalanx.supervision import ChildSpec, Supervisor, SupervisorSpec
        class A(pykka.ThreadingActor):
            def on_stop(self):
                print("stopped", flush=True)
        top = Supervisor(SupervisorSpec("top", children=[ChildSpec("a", A.start)]))
        print("end of program", flush=True)
    """)

    assert done.returncode == 0
    assert done.stdout.splitlines() == ["end of program", "stopped"]


def test_ctrl_c_during_a_hanging_start_ends_the_program_and_what_had_started() -> None:
    done = in_sub_process("""
        import os, signal, threading
        from phalanx.supervision import ChildSpec, Supervisor, SupervisorSpec, thread_child
        ended = threading.Event()
        def work(stop):
            stop.wait()
            ended.set()
        def hang(ctx):
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait()
        try:
            Supervisor(SupervisorSpec("top", children=[
                ChildSpec("a", thread_child(work)), ChildSpec("b", hang)]))
        except KeyboardInterrupt:
            print("interrupted", ended.wait(10), flush=True)
    """)

    assert (done.returncode, done.stdout) == (0, "interrupted True\n"), done.stderr


def test_stopping_all_actors_of_pykka_stops_the_children_too() -> None:
    puppet = Puppet()
    top = Supervisor(tree(ChildSpec("a", puppet)))

    pykka.ActorRegistry.stop_all(block=True, timeout=LIMIT)

    assert puppet.told.get(timeout=LIMIT) == "terminate"
    assert top.wait_ended(LIMIT) is not None
    top.stop()


@pytest.fixture(autouse=True)
def no_actor_left() -> Iterator[None]:
    yield
    assert pykka.ActorRegistry.get_all() == []
