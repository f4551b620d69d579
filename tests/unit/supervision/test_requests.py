"""What a running supervisor is asked: every caller is answered, whatever becomes of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
from tests.support.processes import run_threads, start_thread, wait_until
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
    IGNORE,
    BackOff,
    ChildExited,
    ChildRefused,
    ChildSpec,
    Intensity,
    Notice,
    SpecError,
    StartFailed,
    Strategy,
    Supervisor,
    SupervisorDown,
    SupervisorSpec,
    WouldDeadlock,
    pykka_child,
    thread_child,
)
from phalanx.supervision.core.machine import SupervisorMachine

pytestmark = pytest.mark.usefixtures("phalanx_leak_check")


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("it says nothing")


def start_mute(_: object) -> Any:
    raise Mute


@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (lambda top: top.start_child(print), SpecError),
        (lambda top: top.terminate_child(["a"]), SpecError),
        (lambda top: top.restart_child({}), SpecError),
        (lambda top: top.delete_child(None), SpecError),
        (lambda top: top.get_childspec(1), SpecError),
        (lambda top: top.start_child(ChildSpec("b", start_mute)), StartFailed),
        (lambda top: top.close("by hand", LIMIT), SpecError),
        (lambda top: top.subscribe(None), SpecError),
        (lambda top: top.monitor("a", "a"), SpecError),
    ],
)
def test_a_request_that_makes_no_sense_ends_no_tree(
    ask: Callable[[Supervisor], Any], error: type[Exception]
) -> None:
    with Supervisor(tree(ChildSpec("a", Echo.start))) as top:
        with pytest.raises(error):
            ask(top)

        assert [row.key for row in top.which_children()] == ["a"]


def test_a_tree_that_does_not_start_says_so_also_if_the_error_has_no_text() -> None:
    with pytest.raises(StartFailed, match="top: a child did not start: Mute"):
        Supervisor(tree(ChildSpec("a", start_mute)))


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
        "pool", Strategy.SIMPLE_ONE_FOR_ONE, children=[ChildSpec("w", pykka_child(Echo))]
    )
    with Supervisor(tree(pool)) as top:
        view = top.supervisor("pool")
        assert [view.start_child(), view.start_child()] == ["w#1", "w#2"]

        top.terminate_child("pool")
        top.restart_child("pool")

        assert view.start_child() == "w#3"
        assert view.count_children().active == 1


def test_a_key_of_thousands_of_digits_names_no_instance() -> None:
    template = ChildSpec("w", thread_child(wait_stop))
    with Supervisor(tree(template, strategy=Strategy.SIMPLE_ONE_FOR_ONE)) as top:
        with pytest.raises(ChildRefused, match="simple_one_for_one"):
            top.terminate_child("w#" + "9" * 5000, timeout=LIMIT)

        assert top.start_child(timeout=LIMIT) == "w#1"


def test_who_waits_for_a_child_below_one_that_is_no_supervisor_is_refused() -> None:
    with Supervisor(tree(ChildSpec("a", Echo.start))) as top:
        with pytest.raises(ChildRefused, match="not_found") as caught:
            top.wait_child("a/b", LIMIT)

        assert caught.value.child == "a/b"


def test_a_view_waits_for_a_child_while_its_own_supervisor_waits_for_its_restart(
    notices: Notices,
) -> None:
    scripted = ScriptedChild()
    sub = SupervisorSpec("sub", intensity=Intensity(0), children=[ChildSpec("a", scripted)])
    spec = tree(sub, backoff=BackOff(60.0, maximum=60.0))
    with Supervisor(spec, subscriber=notices) as top:
        view = top.supervisor("sub")
        scripted.contexts.get(timeout=LIMIT).exited(CRASH)
        notices.wait(lambda n: isinstance(n, ChildExited) and n.path == "top/sub")

        with pytest.raises(TimeoutError, match="a does not run after 0.01 s"):
            view.wait_child("a", 0.01)


def test_a_child_that_is_being_started_has_no_lifeline_yet() -> None:
    starting, release = threading.Event(), threading.Event()

    def slow(_: Any) -> Any:
        starting.set()
        release.wait(LIMIT)
        return IGNORE

    with Supervisor(tree()) as top:
        adding = start_thread(lambda: top.start_child(ChildSpec("a", slow)))
        assert starting.wait(LIMIT)

        with pytest.raises(ChildRefused, match="not_running"):
            top.lifeline("a")
        release.set()
        adding.join(LIMIT)


def test_a_request_during_a_long_start_times_out_and_is_answered_later() -> None:
    release, starting, scripted = threading.Event(), threading.Event(), ScriptedChild()

    def slow(ctx: Any) -> Any:
        starting.set()
        release.wait()
        return scripted(ctx)

    with Supervisor(tree()) as top:
        adding = start_thread(lambda: top.start_child(ChildSpec("a", slow)))
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
    wait_until(lambda: top._top.machine._mailbox)

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

    monkeypatch.setattr(SupervisorMachine, "handle", broken)
    answer = ask_in_thread(top.count_children)

    assert isinstance(answer.get(timeout=LIMIT), SupervisorDown)
    reason = top.wait_closed(LIMIT)
    assert reason is not None
    assert "a bug of ours" in reason.detail
    top.close()


@pytest.mark.parametrize("nested", [False, True])
def test_waiting_for_a_tree_on_the_thread_of_one_of_its_supervisors_raises_instead(
    notices: Notices, nested: bool
) -> None:
    raised: SimpleQueue[BaseException] = SimpleQueue()

    def wait_for_itself(notice: Notice) -> None:
        if isinstance(notice, ChildExited):
            for wait in (top.close, top.wait_closed, top.which_children):
                try:
                    wait()
                except WouldDeadlock as error:
                    raised.put(error)

    scripted = ScriptedChild()
    child = ChildSpec("a", scripted)
    below = SupervisorSpec("sub", children=[child]) if nested else child
    with Supervisor(tree(below), subscriber=wait_for_itself) as top:
        top.subscribe(notices)
        scripted.contexts.get(timeout=LIMIT).exited(CRASH)

        for _ in range(3):
            assert "top cannot wait for itself" in str(raised.get(timeout=LIMIT))
        notices.wait_started("top/sub/a" if nested else "top/a", 2)


def test_stopping_twice_and_from_two_threads_is_harmless() -> None:
    top = Supervisor(tree(ChildSpec("a", Echo.start)))
    run_threads(4, lambda _: top.close())

    top.close()

    assert top.exit_reason is not None
