"""An engine's workers are brought back within limits; requests that kill them end alone."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.integrations.vllm.engine_state import EngineState
from phalanx.integrations.vllm.journal import Journal
from phalanx.integrations.vllm.recovery import Recovery, StaleEpoch, WeightsLost
from phalanx.integrations.vllm.suspects import Suspects, with_siblings
from phalanx.runtime import GroupDown, GroupUp
from phalanx.supervision import CallTimeout, ExecutorClosed, NotPicklable, UnknownMethod, WorkerDied

LONG = 10.0


class Group:
    """A rank group of which each call does what the test says.

    Attributes:
        made: The calls, with their options.
    """

    def __init__(self, **answers: Callable[..., Any]) -> None:
        self.number = 1
        self.made: list[tuple[str, float | None, dict[str, Any]]] = []
        self.answers: dict[str, Callable[..., Any]] = {"epoch": lambda: self.number, **answers}
        self.on_event: Callable[[object], None] = lambda _: None
        self.phase = "serving"

    def subscribe(self, then: Callable[[object], None]) -> Callable[[], None]:
        self.on_event = then
        return lambda: None

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: Any = (), **options: Any
    ) -> Any:
        self.made.append((method, timeout, {"args": args, **options}))
        answer = self.answers.get(method)
        return None if answer is None else answer(*args)

    def status(self) -> Any:
        return SimpleNamespace(phase=self.phase)

    def down(self, epoch: int | None = None) -> None:
        """Note that a worker of *epoch* has died; None for the current one."""
        number = self.number if epoch is None else epoch
        self.on_event(GroupDown(group="g", epoch=number, cause="rank 0 died", at=0.0))

    def up(self) -> None:
        """Note that all workers are new."""
        self.number += 1
        self.on_event(GroupUp(group="g", epoch=self.number, world_size=1, took=0.1, at=0.0))

    def calls(self, method: str) -> list[dict[str, Any]]:
        return [options for name, _, options in self.made if name == method]


class Ended(Exception):
    """The error of an engine that has ended."""


def ending(reasons: list[str]) -> Callable[[str], Exception]:
    """Return what keeps the reasons that an engine ends for."""

    def ended(reason: str) -> Ended:
        reasons.append(reason)
        return Ended(reason)

    return ended


def recovery(
    group: Any,
    journal: Journal | None = None,
    limit: float = LONG,
    hook: Any = None,
    ended: Callable[[str], Exception] = Ended,
) -> Recovery:
    journal = journal or Journal(["update"], harmless=["look"])
    return Recovery(
        group, journal, limit=limit, ended=ended, state=EngineState(), hook=hook, most=3
    )


def call(recovery: Recovery, method: str | bytes, timeout: float | None = LONG, **how: Any) -> Any:
    options: dict[str, Any] = {"non_block": False, **how}
    return recovery.call(method, timeout, (1,), {}, **options)


def test_restarts_in_a_row_that_bring_no_worker_back_end_the_engine() -> None:
    reasons: list[str] = []
    group = Group()
    engine = recovery(group, ended=ending(reasons))

    for epoch in range(1, 4):
        group.down(epoch)
        group.down(epoch)  # another rank, of the same cause
    engine.end_row()  # a step had an output
    for epoch in range(4, 7):
        group.down(epoch)
    group.phase = "closing"
    group.down(7)
    assert reasons == []  # the group gives its own reason
    group.phase = "mending"
    group.down(7)

    assert reasons == ["more than 3 restarts in a row without a result between"]
    engine.close()


def test_workers_keep_no_engine_alive_whose_start_failed() -> None:
    group = Group()
    engine = recovery(group)
    group.up()
    engine.restore()
    left = weakref.ref(engine)

    del engine
    gc.collect()

    assert left() is None
    group.up()


def test_workers_that_die_idle_now_and_then_end_no_engine() -> None:
    reasons: list[str] = []
    group = Group()
    engine = recovery(group, limit=0.01, ended=ending(reasons))

    for _ in range(5):
        group.down()
        group.up()
        engine.restore()
        time.sleep(0.02)

    assert reasons == []
    engine.close()


def test_workers_that_die_while_they_are_restored_serve_only_after_the_next_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = Group(prepare=lambda *_: group.down(3) if group.number == 3 else None)
    engine = recovery(group)
    phases: list[str] = []
    monkeypatch.setattr(engine._state, "set", lambda phase, *_: phases.append(phase))

    for epoch in (1, 2, 3):
        if epoch < 3:
            group.down(epoch)
        group.up()
        engine.restore()

    assert phases == ["recovering", "serving", "recovering", "recovering", "serving"]
    engine.close()


def test_workers_that_die_while_it_is_noted_that_they_serve_do_not_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = Group()
    engine = recovery(group)
    phases: list[str] = []

    def note(phase: str, *_: str) -> None:
        if phase == "serving":
            group.down(2)
        phases.append(phase)

    monkeypatch.setattr(engine._state, "set", note)
    group.down(1)
    group.up()
    engine.restore()

    assert phases[-1] == "recovering"
    engine.close()


def test_a_call_that_does_not_block_is_replayed_like_any_other() -> None:
    group = Group(rpc=lambda *_: ["done"])
    engine = recovery(group)

    assert call(engine, "update", non_block=True).result(LONG) == ["done"]
    group.number = 2
    engine.restore()

    (replay,) = group.calls("prepare")
    assert [(entry.method, entry.args) for entry in replay["args"][1]] == [("update", (1,))]
    engine.close()


def test_workers_are_restored_as_soon_as_they_are_up_and_once() -> None:
    restored = threading.Event()
    group = Group(prepare=lambda *_: restored.set())
    engine = recovery(group)

    group.up()
    assert restored.wait(LONG)
    assert engine.restore() == 2

    assert len(group.calls("prepare")) == 1
    engine.close()


def test_a_users_timeout_bounds_the_recovery_before_the_call() -> None:
    gate = threading.Event()
    group = Group(prepare=lambda *_: gate.wait(LONG))
    engine = recovery(group)
    group.up()

    with pytest.raises(CallTimeout, match="look") as caught:
        call(engine, "look", timeout=0.05)

    assert not caught.value.sent
    gate.set()
    engine.restore()
    assert group.calls("rpc") == []
    engine.close()


def test_a_replay_has_the_limit_of_a_start_and_is_tried_again_after_it() -> None:
    group = Group()
    times: list[float | None] = []

    def prepare(*_: object) -> None:
        times.append(group.made[-1][1])
        if len(times) == 1:
            raise CallTimeout("prepare", [0], 3.0)

    group.answers["prepare"] = prepare
    engine = recovery(group, limit=3.0)
    group.number = 2

    assert engine.restore() == 2

    assert times == [3.0, 3.0]
    assert [each["on_timeout"] for each in group.calls("prepare")] == ["restart"] * 2
    engine.close()


def test_a_callers_shorter_timeout_restarts_no_worker_that_replays() -> None:
    def prepare(*_: object) -> None:
        raise CallTimeout("prepare", [0], 1.0)

    group = Group(prepare=prepare)
    engine = recovery(group)
    group.number = 2

    with pytest.raises(CallTimeout):
        call(engine, "look", timeout=1.0)

    assert [each["on_timeout"] for each in group.calls("prepare")] == ["leave"]
    engine.close()


@pytest.mark.parametrize("error", [StaleEpoch("gone"), WorkerDied("look: rank 0 died")])
def test_only_calls_of_vllms_own_are_made_again_after_a_death(error: Exception) -> None:
    group = Group()
    failed: list[Any] = []

    def rpc(*args: Any) -> str:
        if args[1] not in failed:
            failed.append(args[1])
            raise error
        return "answer"

    group.answers["rpc"] = rpc
    engine = recovery(group)

    assert call(engine, "list_loras") == "answer"
    if isinstance(error, WorkerDied):
        with pytest.raises(WorkerDied):
            call(engine, "look")
    else:
        assert call(engine, "look") == "answer"

    assert [each["retries"] for each in group.calls("rpc")][:3] == [1, 1, 0]
    engine.close()


DEVICE = RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (ValueError("rank 1: half of it is set"), ["update"]),
        (CallTimeout("update", [1], 3.0), ["update"]),
        (NotPicklable("rank 0: its answer"), ["update"]),
        (CallTimeout("update", (), 3.0, sent=False), []),
        (UnknownMethod("no update"), []),
        (DEVICE, []),  # its workers end, and what it may have set with them
    ],
)
def test_an_update_that_raises_may_have_had_a_part_of_its_effect(
    error: Exception, lost: list[str]
) -> None:
    def fail(*_: Any) -> None:
        raise error

    group = Group(rpc=fail)
    journal = Journal(["update"])
    engine = recovery(group, journal)

    with pytest.raises(type(error)):
        call(engine, "update")

    assert journal.lost == lost
    group.number = 2
    if lost:
        with pytest.raises(Ended, match="set by update"):
            engine.restore()
    else:
        assert engine.restore() == 2
    engine.close()


def test_the_end_of_the_group_is_the_error_of_every_call_and_no_thread_stays() -> None:
    group = Group()
    engine = recovery(group)

    def end() -> int:
        raise ExecutorClosed("too many restarts")

    group.answers["epoch"] = end
    group.up()
    with pytest.raises(Ended):
        call(engine, "look")
    with pytest.raises(Ended):
        engine.restore()
    engine.close()
    group.up()  # closed: ignored
    with pytest.raises(Ended):
        call(engine, "look")

    assert not [each for each in threading.enumerate() if each.name.startswith("phalanx-heal")]


def test_weights_that_died_with_their_workers_end_the_engine_unless_they_are_replayed() -> None:
    group = Group(rpc=lambda *_: ["done"])
    engine = recovery(group, Journal())
    other = recovery(group, Journal(["update_weights"]))
    for each in (engine, other):
        call(each, "update_weights")

    group.number = 2

    with pytest.raises(Ended, match="set by update_weights, and died"):
        engine.restore()
    assert group.calls("prepare") == []
    assert other.restore() == 2
    engine.close()
    other.close()


def test_lost_weights_are_set_by_the_hook_before_anything_runs_on_new_workers() -> None:
    group = Group(rpc=lambda *_: ["done"])
    news: list[WeightsLost] = []

    def hook(lost: WeightsLost) -> None:
        news.append(lost)
        assert lost.call("set", 7, fast=True) == ["done"]

    engine = recovery(group, Journal(), hook=hook)
    call(engine, "update_weights")
    group.number = 2

    call(engine, "look")

    assert [(each.epoch, each.methods) for each in news] == [(2, ("update_weights",))]
    sent = [each["args"] for each in group.calls("rpc")]
    assert [each[:2] for each in sent] == [(1, "update_weights"), (2, "set"), (2, "look")]
    assert sent[1][2:] == ((7,), {"fast": True})
    engine.close()


def test_a_hook_whose_workers_die_is_called_for_the_next_ones() -> None:
    group = Group()
    epochs: list[int] = []

    def hook(lost: WeightsLost) -> None:
        epochs.append(lost.epoch)
        if lost.epoch == 2:
            group.number = 3
            raise WorkerDied("set: rank 0 died")

    engine = recovery(group, Journal(), hook=hook)
    call(engine, "update_weights")
    group.number = 2

    assert engine.restore() == 3
    assert epochs == [2, 3]
    engine.close()


def test_a_hook_that_raises_or_takes_too_long_ends_the_engine() -> None:
    gate = threading.Event()

    def broken(_: WeightsLost) -> None:
        raise ValueError("no such version")

    def late(_: WeightsLost) -> None:
        raise TimeoutError("the store does not answer")

    def cancelled(_: WeightsLost) -> None:
        raise CancelledError

    cases: list[Any] = [
        (lambda _: gate.wait(LONG), 0.05, "more than 0.05 s"),
        (cancelled, LONG, "raised CancelledError"),
        (broken, LONG, "no such version"),
        (late, LONG, "raised TimeoutError.'the store does not answer'"),
    ]
    for hook, limit, why in cases:
        group = Group()
        engine = recovery(group, Journal(), limit, hook)
        call(engine, "update_weights")
        group.number = 2
        with pytest.raises(Ended, match=why):
            engine.restore()
        gate.set()
        engine.close()


@pytest.mark.parametrize("kind", [WorkerDied, ExecutorClosed])
def test_a_hook_whose_own_workers_die_ends_the_engine(kind: type[Exception]) -> None:
    def hook(_: WeightsLost) -> None:
        raise kind("of the trainer")

    group = Group()
    engine = recovery(group, Journal(), hook=hook)
    call(engine, "update_weights")
    group.number = 2

    with pytest.raises(Ended, match=rf"on_weights_lost raised {kind.__name__}\('of the trainer"):
        call(engine, "look")
    engine.close()


def test_a_hook_that_never_returns_holds_up_no_close_and_the_end_is_no_failure_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate, begun = threading.Event(), threading.Event()

    def hook(_: WeightsLost) -> None:
        begun.set()
        gate.wait()

    reasons: list[str] = []
    group = Group()
    engine = recovery(group, Journal(), 6 * LONG, hook, ending(reasons))
    call(engine, "update_weights")
    group.up()
    assert begun.wait(LONG)
    queued = [call(engine, "look", non_block=True) for _ in range(2)]

    def end() -> int:
        raise ExecutorClosed("it was shut down")

    group.answers["epoch"] = end
    closing = threading.Thread(target=engine.close, daemon=True)
    closing.start()
    closing.join(LONG)

    assert not closing.is_alive()
    assert [str(each.exception(LONG)) for each in queued] == ["", ""]  # no reason of its own
    assert [type(each.exception(LONG)) for each in queued] == [Ended, Ended]
    assert reasons == [""] * 3
    assert caplog.records == []
    gate.set()


def test_a_callers_timeout_does_not_call_the_hook_twice() -> None:
    gate = threading.Event()
    called: list[int] = []

    def hook(lost: WeightsLost) -> None:
        called.append(lost.epoch)
        gate.wait(LONG)

    group = Group()
    engine = recovery(group, Journal(), hook=hook)
    call(engine, "update_weights")
    group.number = 2

    with pytest.raises(CallTimeout):
        call(engine, "list_loras", timeout=0.05)
    gate.set()
    assert engine.restore() == 2

    assert called == [2]
    engine.close()


# --- requests that kill ---------------------------------------------------------------------


def lose(suspects: Suspects, *running: str, place: int = 10) -> list[str]:
    return suspects.lose(dict.fromkeys(running, place))


def compute(suspects: Suspects, *requests: str, steps: int = 8, place: int = 10) -> None:
    for _ in range(steps):
        suspects.computed(requests, lambda _: place)


def test_a_request_that_kills_whenever_it_runs_ends_alone() -> None:
    suspects = Suspects(2)
    known = ["a", "poison", "b"]

    assert lose(suspects, *known) == []
    assert suspects.may_run([], known) is None
    assert lose(suspects, *known) == []

    assert suspects.may_run([], known) == 1
    assert suspects.may_run(["a"], known) == 1  # the one on trial
    compute(suspects, "a")
    assert suspects.may_run(["a"], known) == 2  # cleared: beside it the next
    assert lose(suspects, "a", "poison") == ["poison"]
    assert suspects.may_run(["a"], ["a", "b"]) == 2  # of the third nothing is known yet
    compute(suspects, "a", "b")
    assert suspects.may_run(["a", "b"], ["a", "b"]) is None
    assert not suspects.is_watching


def test_losses_that_are_far_apart_make_no_suspect() -> None:
    suspects = Suspects(2)

    for _ in range(5):
        assert lose(suspects, "a", "b") == []
        compute(suspects, "a", "b")

    assert suspects.may_run([], ["a", "b"]) is None


def test_steps_before_the_place_of_the_loss_clear_nobody() -> None:
    suspects = Suspects(2)

    for _ in range(2):
        assert lose(suspects, "long", place=200) == []
        compute(suspects, "long", steps=30, place=199)  # its prompt again, piece by piece

    assert lose(suspects, "long", place=200) == ["long"]


def test_each_loss_is_made_by_one_request() -> None:
    suspects = Suspects(2)
    for _ in range(5):  # of others
        lose(suspects, "a")
        compute(suspects, "a")

    ended = [lose(suspects, "bad", "worse") for _ in range(3)]
    assert (ended[-1], suspects.take_row()) == (["bad", "worse"], 3)
    lose(suspects, "b")
    assert suspects.take_row() == 1
    assert suspects.take_row() == 0


def test_the_answers_of_one_request_end_together() -> None:
    known = ["0_a-1f", "1_a-1f", "0_b-2e", "1_c-3d", "a-1f", "plain"]

    assert with_siblings(["1_a-1f"], known) == {"0_a-1f", "1_a-1f"}
    assert with_siblings(["plain"], known) == {"plain"}


def test_a_suspect_that_has_gone_holds_up_nothing() -> None:
    suspects = Suspects(1)
    lose(suspects, "a")

    assert suspects.may_run([], ["a", "b"]) == 1
    assert suspects.may_run([], ["b"]) is None


def test_without_a_limit_there_are_no_suspects() -> None:
    suspects = Suspects(0)

    assert [lose(suspects, "a") for _ in range(4)] == [[]] * 4
    assert suspects.may_run([], ["a"]) is None
