"""What supervisors do beyond OTP: deciders, back-off, use, links, monitors and pictures."""

from __future__ import annotations

import inspect
import signal
import sys
import threading
from queue import SimpleQueue
from typing import Any

import pytest
from tests.support.supervised_actors import (
    CRASH,
    LIMIT,
    Echo,
    Notices,
    ScriptedChild,
    tree,
    wait_stop,
)

from phalanx.supervision import (
    KILLED,
    NORMAL,
    BackOff,
    CallbackFailed,
    ChildExited,
    ChildSpec,
    ChildStarted,
    Decider,
    Directive,
    Down,
    ExitKind,
    ExitReason,
    Intensity,
    Notice,
    Restart,
    Rule,
    Strategy,
    Supervisor,
    SupervisorSpec,
    link,
    thread_child,
)
from phalanx.supervision.tree.adapters import StopSignal

pytestmark = pytest.mark.usefixtures("phalanx_leak_check")


@pytest.mark.parametrize(
    ("directive", "incarnation", "state"),
    [
        (None, 1, "running"),  # as in Pykka
        (Directive.RESUME, 1, "running"),
        (Directive.RESTART, 2, "running"),
        (Directive.STOP, 1, "undefined"),
    ],
)
def test_the_caller_gets_its_exception_and_the_decider_says_what_follows(
    notices: Notices, directive: Directive | None, incarnation: int, state: str
) -> None:
    rules = () if directive is None else (Rule(KeyError, directive),)
    spec = tree(ChildSpec("a", Echo.start), decider=Decider(rules))
    with Supervisor(spec, subscriber=notices) as top:
        with pytest.raises(KeyError):
            top.child("a").ask(KeyError("k"), timeout=LIMIT)

        if directive in (Directive.RESTART, Directive.STOP):
            notices.wait(lambda n: isinstance(n, ChildExited))
        if directive is Directive.RESTART:
            notices.wait_started("top/a", 2)
        top.which_children(timeout=LIMIT)
        (child,) = top.status().children
        assert (child.incarnation, child.state) == (incarnation, state)


def test_escalate_gives_up_at_once(notices: Notices) -> None:
    spec = tree(
        ChildSpec("a", Echo.start), decider=Decider((Rule(ExitKind.CRASH, Directive.ESCALATE),))
    )
    top = Supervisor(spec, subscriber=notices)

    top.child("a").tell(ValueError("boom"))

    reason = top.wait_closed(LIMIT)
    assert reason is not None
    assert reason.detail == "gave up: escalated by the decider"
    top.close()


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
    scripted = ScriptedChild()
    top = Supervisor(tree(ChildSpec("a", scripted), fruitless_limit=2))

    scripted.contexts.get(timeout=LIMIT).exited(CRASH)
    second = scripted.contexts.get(timeout=LIMIT)
    second.progressed()
    second.exited(CRASH)
    for _ in range(2):
        scripted.contexts.get(timeout=LIMIT).exited(CRASH)

    reason = top.wait_closed(LIMIT)
    assert reason is not None
    assert "was restarted 2 times in a row and was of no use" in reason.detail
    top.close()


def test_a_start_by_hand_is_no_restart_that_was_of_no_use() -> None:
    scripted = ScriptedChild()
    with Supervisor(tree(ChildSpec("a", scripted), fruitless_limit=1)) as top:
        scripted.contexts.get(timeout=LIMIT)
        top.terminate_child("a", timeout=LIMIT)
        top.restart_child("a", timeout=LIMIT)

        scripted.contexts.get(timeout=LIMIT).exited(CRASH)

        assert scripted.contexts.get(timeout=LIMIT).incarnation == 3


@pytest.mark.parametrize("nested", [False, True])
def test_an_actor_that_handled_a_message_and_the_supervisor_above_it_have_been_of_use(
    notices: Notices, nested: bool
) -> None:
    child = ChildSpec("a", Echo.start)
    sub = SupervisorSpec("sub", intensity=Intensity(0), children=[child])
    path = "sub/a" if nested else "a"
    spec = tree(sub if nested else child, fruitless_limit=1)
    with Supervisor(spec, subscriber=notices) as top:
        for incarnation in (2, 3, 4):
            assert top.child(path).ask("hello", timeout=LIMIT) == "hello"
            top.child(path).tell(ValueError("boom"))
            notices.wait_started("top/sub" if nested else "top/a", incarnation)


def test_a_thread_that_says_so_or_returns_has_been_of_use(notices: Notices) -> None:
    turns = iter([True, True, True, False, False])

    def work(stop: StopSignal) -> None:
        if next(turns, None) is None:
            stop.wait()
        elif next(turns, False):
            stop.progressed()
            raise RuntimeError("after some use")

    with Supervisor(
        tree(ChildSpec("a", thread_child(work)), fruitless_limit=1), subscriber=notices
    ):
        notices.wait_started("top/a", 4)


def test_a_use_counts_also_if_the_child_is_stopped_for_a_sibling() -> None:
    a, b = ScriptedChild(), ScriptedChild()
    children = ChildSpec("a", a), ChildSpec("b", b)
    with Supervisor(tree(*children, strategy=Strategy.ONE_FOR_ALL, fruitless_limit=2)) as top:
        for ended, stopped in ((a, b), (b, a), (a, b), (b, a)):
            ctx = ended.contexts.get(timeout=LIMIT)
            stopped.contexts.get(timeout=LIMIT).progressed()
            ctx.exited(KILLED)

        assert a.contexts.get(timeout=LIMIT)
        assert top.exit_reason is None


def test_a_preemption_does_not_count_where_the_spec_says_so() -> None:
    scripted = ScriptedChild()
    spec = SupervisorSpec(
        "top", intensity=Intensity(0), children=[ChildSpec("a", scripted)], count_preemption=False
    )
    with Supervisor(spec) as top:
        for _ in range(3):
            ctx = scripted.contexts.get(timeout=LIMIT)
            ctx.exited(ExitReason(ExitKind.CRASH, signal=signal.SIGTERM))

        scripted.contexts.get(timeout=LIMIT)
        assert top.status().restarts == 0


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
    a = ScriptedChild()
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


@pytest.mark.parametrize("error", [ValueError("bad watcher"), SystemExit(5)], ids=repr)
def test_a_watcher_that_raises_costs_nobody_the_news(
    error: BaseException, notices: Notices
) -> None:
    def bad(_: Down) -> None:
        raise error

    scripted = ScriptedChild()
    told: SimpleQueue[Down] = SimpleQueue()
    with Supervisor(tree(ChildSpec("a", scripted)), subscriber=notices) as top:
        top.monitor("a", bad)
        top.monitor("a", told.put)

        scripted.contexts.get(timeout=LIMIT).exited(CRASH)

        notices.wait_started("top/a", 2)
        assert told.get(timeout=LIMIT).reason == CRASH
        failed = notices.wait(lambda n: isinstance(n, CallbackFailed))
        assert isinstance(failed, CallbackFailed)
        assert (failed.path, failed.callback, failed.error) == ("top/a", "monitor", repr(error))


@pytest.mark.parametrize("child", ["thread", "actor", "scripted"])
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

    scripted = ScriptedChild()
    start: Any = {"thread": thread_child(work), "actor": Echo.start, "scripted": scripted}[child]
    spec = tree(ChildSpec("a", start), decider=Decider((Rule(bad, Directive.ESCALATE),)))
    with Supervisor(spec, subscriber=notices) as top:
        if child == "actor":
            top.child("a").tell(ValueError("boom"))
        elif child == "scripted":
            scripted.contexts.get(timeout=LIMIT).exited(CRASH)

        notices.wait_started("top/a", 2)
        failed = notices.wait(lambda n: isinstance(n, CallbackFailed))
        assert isinstance(failed, CallbackFailed)
        assert (failed.path, failed.callback) == ("top/a", "decider")


def test_two_deciders_may_look_at_the_tree_at_once(notices: Notices) -> None:
    both, looked = threading.Barrier(2), SimpleQueue[str]()

    def look(_: object) -> bool:
        both.wait(LIMIT)
        looked.put(top.render())
        return False

    scripted = {key: ScriptedChild() for key in "ab"}
    decider = Decider((Rule(look, Directive.STOP),))
    subs = [
        SupervisorSpec(f"sub-{key}", children=[ChildSpec(key, child)], decider=decider)
        for key, child in scripted.items()
    ]
    with Supervisor(tree(*subs), subscriber=notices) as top:
        for child in scripted.values():
            child.contexts.get(timeout=LIMIT).exited(CRASH)

        for key in scripted:
            notices.wait_started(f"top/sub-{key}/{key}", 2)
    assert looked.qsize() == 2


@pytest.mark.parametrize("directive", [None, Directive.RESTART])
def test_a_decider_is_not_asked_about_an_end_that_was_requested_or_has_a_directive(
    directive: Directive | None, notices: Notices
) -> None:
    asked = SimpleQueue[object]()
    scripted = ScriptedChild()
    spec = tree(ChildSpec("a", scripted), decider=Decider((Rule(asked.put, Directive.STOP),)))  # type: ignore[arg-type]
    with Supervisor(spec, subscriber=notices) as top:
        if directive is None:
            top.terminate_child("a", timeout=LIMIT)
        else:
            scripted.contexts.get(timeout=LIMIT).exited(CRASH, directive)
            notices.wait_started("top/a", 2)
    assert asked.empty()


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
    a, b = ScriptedChild(), ScriptedChild()
    with Supervisor(tree(ChildSpec("a", a), ChildSpec("b", b))) as top:
        link(top.lifeline("a"), top.lifeline("b"), on_down=told.put)

        a.contexts.get(timeout=LIMIT).exited(CRASH)

        assert told.get(timeout=LIMIT).path == "top/a"
        a.contexts.get(timeout=LIMIT)  # it was started again, so everybody has been told
        top.which_children(timeout=LIMIT)
        assert b.told.empty()


def test_the_tree_is_shown_as_text_with_what_happened(notices: Notices) -> None:
    sub = SupervisorSpec(
        "sub", Strategy.REST_FOR_ONE, children=[ChildSpec("x", thread_child(wait_stop))]
    )
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
