"""The supervisor as an actor, over threads, Pykka actors, processes and other supervisors."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import pykka
import pytest
from tests.support.processes import start_thread
from tests.support.supervised_actors import (
    CRASH,
    LIMIT,
    Echo,
    Notices,
    ScriptedChild,
    in_sub_process,
    stop_every_actor,
    tree,
)

from phalanx.supervision import (
    IGNORE,
    KILLED,
    SHUTDOWN,
    CallbackFailed,
    ChildExited,
    ChildLost,
    ChildSpec,
    Down,
    ExitKind,
    ExitReason,
    Intensity,
    Restart,
    SpecError,
    StartContext,
    StartFailed,
    Strategy,
    Supervisor,
    SupervisorDown,
    SupervisorSpec,
    thread_child,
)
from phalanx.supervision.core.machine import SupervisorMachine
from phalanx.supervision.core.messages import Event, Exited, Request, StartChild, Started
from phalanx.supervision.tree.actor import SupervisorActor
from phalanx.supervision.tree.services import TreeServices

pytestmark = pytest.mark.usefixtures("phalanx_leak_check")


# --- children of every kind ---------------------------------------------------------------


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


def test_an_end_without_a_reason_that_is_one_is_an_unknown_end(notices: Notices) -> None:
    scripted = ScriptedChild()
    with Supervisor(tree(ChildSpec("a", scripted)), subscriber=notices):
        scripted.contexts.get(timeout=LIMIT).exited("crash")

        notices.wait_started("top/a", 2)
        (exited,) = (n for n in notices.seen if isinstance(n, ChildExited))
        assert exited.reason.kind is ExitKind.UNKNOWN
        assert "'crash'" in exited.reason.detail


# --- starts and stops that go wrong -------------------------------------------------------


def test_a_failed_start_stops_what_had_started_and_raises_with_the_cause() -> None:
    scripted = ScriptedChild()

    def bad(ctx: Any) -> Any:
        raise OSError("no such device")

    with pytest.raises(StartFailed, match="no such device") as caught:
        Supervisor(tree(ChildSpec("a", scripted), ChildSpec("b", bad)))

    assert isinstance(caught.value.__cause__, OSError)
    assert scripted.told.get(timeout=LIMIT) == "terminate"


@pytest.mark.parametrize("nonsense", [None, 5, "handle"])
def test_a_start_function_that_returns_nonsense_has_failed(nonsense: object) -> None:
    def start(ctx: Any) -> Any:
        return nonsense

    with pytest.raises(StartFailed, match="top/a: start returned"):
        Supervisor(tree(ChildSpec("a", start)))


def test_a_hanging_start_fails_at_its_deadline_and_what_it_brings_later_is_killed() -> None:
    release, late = threading.Event(), ScriptedChild()

    def hang(ctx: Any) -> Any:
        release.wait()
        return late(ctx)

    with pytest.raises(StartFailed, match="not started within 0.05 s"):
        Supervisor(tree(ChildSpec("a", hang, start_within=0.05)))
    release.set()

    assert late.told.get(timeout=LIMIT) == "kill"


@pytest.mark.parametrize(
    ("error", "kind"), [(None, ExitKind.NORMAL), (OSError("no device"), ExitKind.CRASH)], ids=str
)
def test_the_lifeline_of_a_start_that_brings_nothing_ends(
    error: Exception | None, kind: ExitKind
) -> None:
    told: SimpleQueue[Down] = SimpleQueue()

    def start(ctx: StartContext) -> Any:
        ctx.lifeline.monitor(told.put)
        if error is not None:
            raise error
        return IGNORE

    with Supervisor(tree()) as top, suppress(StartFailed):
        top.start_child(ChildSpec("a", start), timeout=LIMIT)

    assert told.get(timeout=LIMIT).reason.kind is kind


def test_an_actor_has_the_time_of_the_trees_clock_to_start_in() -> None:
    begun, go_on = threading.Event(), threading.Event()
    made: SimpleQueue[Supervisor] = SimpleQueue()

    class Slow(pykka.ThreadingActor):
        def on_start(self) -> None:
            begun.set()
            go_on.wait(LIMIT)

    class Stopped:
        def call_at(self, at: float, callback: Callable[[], object]) -> Callable[[], None]:
            return lambda: None

    spec = tree(ChildSpec("a", Slow.start, start_within=1.0))
    start_thread(lambda: made.put(Supervisor(spec, clock=lambda: 0.0, timers=Stopped())))
    assert begun.wait(LIMIT)
    with pytest.raises(Empty):
        made.get(timeout=0.1)
    go_on.set()

    made.get(timeout=LIMIT).close()


def test_nobody_waits_for_an_actor_whose_start_is_given_up() -> None:
    go_on = threading.Event()

    class Slow(pykka.ThreadingActor):
        def on_start(self) -> None:
            go_on.wait()

    with pytest.raises(StartFailed, match="not started within 0.05 s"):
        Supervisor(tree(ChildSpec("a", Slow.start, start_within=0.05)))

    for thread in threading.enumerate():
        if thread.name.startswith("phalanx-start"):
            thread.join(LIMIT)
            assert not thread.is_alive()
    go_on.set()


def test_a_clock_needs_its_timers_and_a_supervisor_its_spec() -> None:
    wrong: Any = "top"
    with pytest.raises(SpecError, match="timers=None"):
        Supervisor(tree(), clock=lambda: 0.0)
    with pytest.raises(SpecError, match="spec='top'"):
        Supervisor(wrong)


def test_a_thread_that_never_stops_is_reported_lost_and_the_tree_ends(notices: Notices) -> None:
    release = threading.Event()

    def deaf(stop: threading.Event) -> None:
        release.wait()

    spec = ChildSpec("a", thread_child(deaf), shutdown=0.05, kill_within=0.0)
    top = Supervisor(tree(spec), subscriber=notices)

    top.close(timeout=LIMIT)

    assert [n.path for n in notices.seen if isinstance(n, ChildLost)] == ["top/a"]
    release.set()


@pytest.mark.parametrize("error", [RuntimeError("bad handle"), SystemExit(3)], ids=repr)
def test_a_handle_that_raises_costs_its_siblings_nothing(
    error: BaseException, notices: Notices
) -> None:
    class Bad(ScriptedChild):
        def terminate(self, reason: ExitReason) -> None:
            raise error

    good, bad = ScriptedChild(), Bad()
    spec = tree(ChildSpec("good", good), ChildSpec("bad", bad, shutdown=0.05))
    top = Supervisor(spec, subscriber=notices)

    top.close(timeout=LIMIT)

    assert [n.error for n in notices.seen if isinstance(n, CallbackFailed)] == [repr(error)]
    assert bad.told.get(timeout=LIMIT) == "kill"
    assert good.told.get(timeout=LIMIT) == "terminate"


def test_a_supervisor_that_fails_itself_stops_its_children_and_tells_its_parent(
    notices: Notices,
) -> None:
    armed = threading.Event()

    class Clockwork:
        def call_at(self, at: float, callback: Callable[[], object]) -> Callable[[], None]:
            if armed.is_set():
                armed.clear()
                raise MemoryError("in the timers")
            return lambda: None

    scripted, bystander = ScriptedChild(), ScriptedChild()
    sub = SupervisorSpec("sub", children=[ChildSpec("a", scripted), ChildSpec("b", bystander)])
    with Supervisor(tree(sub), subscriber=notices, timers=Clockwork()):
        armed.set()
        scripted.contexts.get(timeout=LIMIT).exited(CRASH)

        notices.wait_started("top/sub", 2)
        assert bystander.told.get(timeout=LIMIT) == "kill"

    exits = [n for n in notices.seen if isinstance(n, ChildExited) and n.path == "top/sub"]
    assert exits[0].reason.kind is ExitKind.CRASH
    assert "MemoryError" in exits[0].reason.detail


def test_after_a_kill_of_the_top_nested_supervisors_still_kill_what_does_not_stop() -> None:
    scripted = ScriptedChild()
    scripted.answers = False
    sub = SupervisorSpec("sub", children=[ChildSpec("a", scripted, shutdown=0.05)])
    top = Supervisor(tree(sub))
    nested = top._top.supervisors().get("sub")
    assert nested is not None
    assert nested.thread is not None

    top.kill()

    assert [scripted.told.get(timeout=LIMIT) for _ in range(2)] == ["terminate", "kill"]
    nested.thread.join(LIMIT)
    assert not nested.thread.is_alive()
    assert top.wait_closed(LIMIT) == KILLED


def test_a_kill_ends_a_nested_supervisor_whose_start_hangs_and_what_that_had_started() -> None:
    release, scripted = threading.Event(), ScriptedChild()

    def hang(ctx: Any) -> Any:
        release.wait()
        return IGNORE

    top = Supervisor(tree())
    sub = SupervisorSpec("sub", children=[ChildSpec("a", scripted), ChildSpec("b", hang)])

    def ask() -> None:
        with suppress(SupervisorDown):
            top.start_child(sub)

    asking = start_thread(ask)
    scripted.contexts.get(timeout=LIMIT)

    top.kill()

    assert scripted.told.get(timeout=LIMIT) == "kill"
    release.set()
    asking.join(LIMIT)
    for thread in threading.enumerate():
        if thread.name.startswith(("SupervisorActor", "phalanx-start")):
            thread.join(LIMIT)


def test_an_exit_that_overtakes_its_start_is_posted_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    posted: list[Event] = []

    def post(event: Event) -> None:
        if isinstance(event, Started):  # the child ends now, on a thread of its own
            ending = start_thread(context.exited, CRASH)
            ending.join(LIMIT)
        posted.append(event)

    spec = ChildSpec("a", ScriptedChild())
    above = SupervisorActor(
        SupervisorSpec("top"), "top", TreeServices(), on_start=print, on_exit=print
    )
    monkeypatch.setattr(above, "post", post)
    context = StartContext(above, StartChild("a", 1, 1, spec), LIMIT)

    context.settle(ScriptedChild())

    assert [type(event) for event in posted] == [Started, Exited]


@pytest.mark.parametrize(
    "child", [ChildSpec("b", Echo.start), SupervisorSpec("b")], ids=["child", "supervisor"]
)
def test_a_start_for_which_there_is_no_thread_fails_and_its_supervisor_goes_on(
    monkeypatch: pytest.MonkeyPatch, child: ChildSpec | SupervisorSpec
) -> None:
    begin = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(("phalanx-start", "SupervisorActor")):
            raise RuntimeError("can't start new thread")
        begin(thread)

    with Supervisor(tree(ChildSpec("a", Echo.start))) as top:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)

            with pytest.raises(StartFailed, match="can't start new thread"):
                top.start_child(child, timeout=LIMIT)

        assert top.child("a").ask("hello", timeout=LIMIT) == "hello"
        assert top.start_child(child, timeout=LIMIT) == "b"


def crash_during_a_start(top: Supervisor, *children: ScriptedChild, end: bool) -> None:
    """Have *children* end while another starts, so that their exits are handled after it."""
    starting, release = threading.Event(), threading.Event()

    def slow(_: Any) -> Any:
        starting.set()
        release.wait(LIMIT)
        return IGNORE

    adding = start_thread(lambda: top.start_child(ChildSpec("slow", slow)))
    assert starting.wait(LIMIT)
    if end:
        top.exits.follow(Down("another tree", SHUTDOWN))
    for child in children:
        child.contexts.get(timeout=LIMIT).exited(CRASH)
    release.set()
    adding.join(LIMIT)


def test_the_crash_of_a_sibling_that_is_restarted_anyway_is_told(notices: Notices) -> None:
    a, b = ScriptedChild(), ScriptedChild()
    spec = tree(ChildSpec("a", a), ChildSpec("b", b), strategy=Strategy.ONE_FOR_ALL)
    with Supervisor(spec, subscriber=notices) as top:
        crash_during_a_start(top, a, b, end=False)

        notices.wait_started("top/b", 2)
        told = [(n.path, n.reason) for n in notices.seen if isinstance(n, ChildExited)]
        assert told == [("top/a", CRASH), ("top/b", CRASH)]
        assert top.status().children[1].last_exit == CRASH
    assert b.told.get(timeout=LIMIT) == "terminate"
    assert b.told.empty()


@pytest.mark.parametrize("strategy", [Strategy.ONE_FOR_ONE, Strategy.DYNAMIC])
def test_the_crash_of_a_child_whose_supervisor_is_ending_is_told(
    strategy: Strategy, notices: Notices
) -> None:
    a = ScriptedChild()
    top = Supervisor(SupervisorSpec("top", strategy), subscriber=notices)
    top.start_child(ChildSpec("a", a))

    crash_during_a_start(top, a, end=True)

    assert top.wait_closed(LIMIT) == SHUTDOWN
    assert [n.reason for n in notices.seen if isinstance(n, ChildExited)] == [CRASH]
    assert a.told.empty()


# --- the program around it ----------------------------------------------------------------


def test_trees_log_to_stderr_and_one_that_the_program_forgets_to_stop_is_stopped_at_its_end() -> (
    None
):
    done = in_sub_process("""
        import pykka
        from phalanx.supervision import ChildSpec, Intensity, Supervisor, SupervisorSpec
        class A(pykka.ThreadingActor):
            def on_receive(self, message):
                raise message
            def on_stop(self):
                print("stopped", flush=True)
        spec = SupervisorSpec("top", intensity=Intensity(0), children=[ChildSpec("a", A.start)])
        ended, forgotten = Supervisor(spec), Supervisor(spec)
        ended.child("a").tell(ValueError("boom"))
        ended.wait_closed(10)
        print("end of program", flush=True)
    """)

    assert (done.returncode, done.stdout) == (0, "end of program\nstopped\n")
    assert "critical" in done.stderr
    assert "phalanx.supervisor_gave_up" in done.stderr


def test_a_tree_that_ended_by_itself_is_let_go_with_its_threads() -> None:
    scripted = ScriptedChild()
    spec = SupervisorSpec("top", intensity=Intensity(0), children=[ChildSpec("a", scripted)])
    top = Supervisor(spec)
    timers: Any = top._services.timers
    threads = [thread for thread in (top._top.thread, timers._thread) if thread is not None]

    scripted.contexts.get(timeout=LIMIT).exited(CRASH)

    for thread in threads:
        thread.join(LIMIT)
    assert [thread.is_alive() for thread in threads] == [False, False]
    gone = weakref.ref(top)
    del top, scripted, spec, timers
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("path", ["a", "sub/b"])
def test_who_asks_for_a_child_of_a_tree_that_has_ended_hears_of_the_end_and_why(path: str) -> None:
    scripted = ScriptedChild()
    sub = SupervisorSpec("sub", children=[ChildSpec("b", ScriptedChild())])
    spec = SupervisorSpec("top", intensity=Intensity(0), children=[ChildSpec("a", scripted), sub])
    top = Supervisor(spec)
    scripted.contexts.get(timeout=LIMIT).exited(CRASH)
    top.wait_closed(LIMIT)

    for ask in (top.child, top.lifeline, top.restart_child):
        with pytest.raises(SupervisorDown, match="tree top has ended: .*more than 0 restarts"):
            ask(path)
    top.close()


def test_what_is_known_of_nested_supervisors_of_instances_goes_with_them() -> None:
    with Supervisor(SupervisorSpec("top", Strategy.DYNAMIC)) as top:
        for _ in range(3):
            key = top.start_child(SupervisorSpec("pool", Strategy.DYNAMIC), timeout=LIMIT)
            assert key is not None
            top.supervisor(key).start_child(ChildSpec("a", ScriptedChild()), timeout=LIMIT)
            top.terminate_child(key, timeout=LIMIT)

        assert top._services.instances == {"top": 3}


def test_a_tree_without_a_thread_to_run_on_says_so_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)

    with pytest.raises(StartFailed, match="top: the supervisor did not start: can't start new"):
        Supervisor(tree(ChildSpec("a", ScriptedChild())))

    assert not pykka.ActorRegistry.get_all()


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


def test_ctrl_c_before_the_start_is_waited_for_ends_the_tree_too() -> None:
    done = in_sub_process("""
        import os, signal, sys, threading
        from phalanx.supervision import ChildSpec, Supervisor, SupervisorExited, SupervisorSpec
        sys.setswitchinterval(30)  # threads give way where they wait, the first time for each other
        notices = []
        def hang(ctx):
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait()
        spec = SupervisorSpec("top", children=[ChildSpec("b", hang)])
        for _ in range(10):
            try:
                Supervisor(spec, subscriber=notices.append)
            except KeyboardInterrupt:
                print("interrupted")
        print(sum(isinstance(each, SupervisorExited) for each in notices), "ended")
    """)

    assert (done.returncode, done.stdout) == (0, "interrupted\n" * 10 + "10 ended\n"), done.stderr


def test_a_forked_process_cannot_use_the_tree_and_ends_without_it() -> None:
    done = in_sub_process("""
        import os, sys
        from phalanx.supervision import (
            ChildSpec, Supervisor, SupervisorDown, SupervisorSpec, thread_child)
        child = ChildSpec("b", thread_child(lambda stop: stop.wait()))
        with Supervisor(SupervisorSpec("top", children=[child])) as tree:
            if (pid := os.fork()) == 0:
                refused = 0
                for use in (tree.count_children, tree.wait_closed, tree.render,
                            *[lambda key=key: tree.child(key) for key in "ab"],
                            lambda: tree.wait_child("b")):
                    try:
                        use()
                    except SupervisorDown as error:
                        refused += "process that forked" in str(error)
                tree.kill()
                sys.exit(refused)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), tree.count_children().specs)
    """)

    assert (done.returncode, done.stdout) == (0, "6 1\n"), done.stderr


@pytest.mark.parametrize("how", ["stop_all", "SystemExit"])
def test_a_tree_is_stopped_by_whoever_owns_it_and_by_no_other_actor(how: Any) -> None:
    scripted = ScriptedChild()
    top = Supervisor(tree(ChildSpec("a", scripted)))

    stop_every_actor(how)

    assert top.count_children(timeout=LIMIT).active == 1
    assert top.exit_reason is None
    top.close()
    assert scripted.told.get(timeout=LIMIT) == "terminate"


def test_a_message_to_every_actor_of_the_program_ends_no_tree() -> None:
    with Supervisor(tree(ChildSpec("a", Echo.start))) as top:
        pykka.ActorRegistry.broadcast({"command": "reload"})

        assert top.count_children(timeout=LIMIT).active == 1
        assert top.exit_reason is None


def test_an_exception_that_strikes_an_actor_between_two_messages_ends_it_as_a_crash() -> None:
    top = Supervisor(tree(ChildSpec("a", ScriptedChild())))
    assert top._top.thread is not None

    strike(top._top.thread, RuntimeError)
    again = Request(pykka.ThreadingFuture(), SupervisorMachine.counts)
    top._top.actor_ref.tell(again)  # it runs again for this

    reason = top.wait_closed(LIMIT)
    assert reason is not None
    assert (reason.kind, "RuntimeError" in reason.detail) == (ExitKind.CRASH, True)
    top.close()


def test_an_actor_that_is_struck_between_two_messages_is_restarted(notices: Notices) -> None:
    child = ChildSpec("a", Echo.start, restart=Restart.TRANSIENT)
    with Supervisor(tree(child), subscriber=notices) as top:
        ref = top.child("a")
        thread = next(t for t in threading.enumerate() if t.name.startswith("Echo-"))

        strike(thread, RuntimeError)
        ref.tell("wake up")

        exited = notices.wait(lambda notice: isinstance(notice, ChildExited))
        assert "RuntimeError" in str(exited)
        notices.wait_started("top/a", 2)


def strike(thread: threading.Thread, error: type[BaseException]) -> None:
    """Have *error* raised in *thread* as soon as it runs again."""
    struck = ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(error)
    )
    assert struck == 1
