"""What goes wrong in a call is its error alone; what cannot be right is refused beforehand."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.support.options import Make
from tests.support.programs import run_python
from tests.support.workers import Echo, NeedsTwo, StartFails

from phalanx.actors import Launch, WorkerActor, WorkerContext
from phalanx.supervision import (
    BadArguments,
    NotPicklable,
    RemoteError,
    SpecError,
    StartFailed,
    UnknownMethod,
)


class Frozen(Exception):
    """Refuses further attributes, notes included."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


class Odd(Echo):
    def cancelled(self) -> None:
        raise asyncio.CancelledError

    def interrupted(self) -> None:
        raise KeyboardInterrupt

    def frozen(self) -> None:
        raise Frozen("as it is")

    async def later(self) -> None:
        """Cannot be called: nothing would run it."""


def test_a_workers_exception_keeps_its_type_and_says_where_it_comes_from(make: Make) -> None:
    ex = make()

    with pytest.raises(ValueError, match="boom") as caught:
        ex.collective_rpc("fail", args=(1,))
    with pytest.raises(ValueError, match="boom"):
        ex.collective_rpc("fail", args=(1,), unique_reply_rank=0)  # whose reply is not wanted
    with pytest.raises(NeedsTwo, match="one") as other:
        ex.call("fail_with_two", rank=0)

    notes = "\n".join(caught.value.__notes__)
    assert "rank 1" in notes
    assert "in fail (call" in notes
    assert "workers.py" in notes
    assert other.value.two == "two"
    (note,) = other.value.__notes__
    assert "raised by rank 0 in fail_with_two" in note
    assert "KeyError: 'inner'" in note
    assert ex.collective_rpc("rank") == [0, 1]


def test_whatever_a_method_ends_in_is_that_calls_error_alone(make: Make) -> None:
    ex = make(Odd, 1)

    for method, name in (("fail_unpicklable", "Unpicklable"), ("fail_unbuildable", "NeedsTwo")):
        with pytest.raises(RemoteError) as caught:  # a faithful stand-in
            ex.collective_rpc(method)
        assert caught.value.type_name.endswith(name)
        assert "Traceback" in caught.value.traceback
    for method in ("cancelled", "interrupted"):
        with pytest.raises(RemoteError):
            ex.collective_rpc(method)
    with pytest.raises(Frozen, match="as it is"):
        ex.collective_rpc("frozen")
    with pytest.raises(NotPicklable, match="the reply"):
        ex.collective_rpc("reply_unpicklable")
    assert ex.ranks[0].incarnation == 1
    assert ex.collective_rpc("rank") == [0]


def test_methods_and_arguments_that_do_not_fit_are_refused_and_the_worker_goes_on(
    make: Make,
) -> None:
    ex = make(Odd, 1)

    with pytest.raises(UnknownMethod, match=r"Odd has no method 'nope'; it has .*echo"):
        ex.collective_rpc("nope")
    with pytest.raises(UnknownMethod, match="async"):
        ex.collective_rpc("later")
    for hook in ("on_start", "__init__"):
        with pytest.raises(UnknownMethod):
            ex.collective_rpc(hook)
    wrong: list[tuple[tuple[Any, ...], dict[str, Any]]]
    wrong = [((), {}), ((1, 2, 3, 4), {}), (("g",), {"wrong": 1}), (("g",), {"gate": 1})]
    for args, kwargs in wrong:
        with pytest.raises(BadArguments, match="gated"):
            ex.collective_rpc("gated", args=args, kwargs=kwargs)
    assert ex.collective_rpc("rank") == [0]


TERMS: list[tuple[str, Any]] = [
    ("timeout", -1),
    ("timeout", float("nan")),
    ("timeout", "5"),
    ("timeout", True),
    ("unique_reply_rank", 2),
    ("unique_reply_rank", -1),
    ("retries", -1),
    ("on_timeout", "pray"),
    ("args", "abc"),
    ("args", 5),
    ("kwargs", [1]),
    ("aggregate", 5),
]


def test_terms_that_make_no_sense_name_the_field_and_long_timeouts_do(make: Make) -> None:
    ex = make()

    for field, value in TERMS:
        with pytest.raises(SpecError) as caught:
            ex.collective_rpc("rank", **{field: value})
        assert caught.value.field == field
    with pytest.raises(SpecError, match=r"args=\(\.\.\.\)"):
        ex.collective_rpc("gated", ("/gate",))  # type: ignore[arg-type]
    for timeout in (float("inf"), 1e7, 1e10):
        assert ex.collective_rpc("rank", timeout) == [0, 1]
        assert ex.collective_rpc("rank", timeout, non_block=True).result(timeout) == [0, 1]


class NotAWorker:
    pass


class AsyncHook(WorkerActor):
    async def checkpoint(self) -> int:
        return 1


class YieldingHook(WorkerActor):
    def on_start(self, ctx: WorkerContext) -> Any:
        yield ctx


async def prepare() -> None:
    pass


class LateAsyncHook(WorkerActor):
    def on_start(self, ctx: WorkerContext) -> Any:
        return prepare()


class HasContext(WorkerActor):
    ctx: Any = None


class Eager(WorkerActor):
    def __init__(self) -> None:
        self.rank = self.ctx.rank


@pytest.mark.parametrize(
    ("worker", "options", "field"),
    [
        (NotAWorker, {}, "worker"),
        ("Echo", {}, "worker"),
        (WorkerActor, {}, "worker"),
        (Echo, {"world_size": 0}, "world_size"),
        (Echo, {"world_size": -1}, "world_size"),
        (Echo, {"world_size": 2.0}, "world_size"),
        (Echo, {"world_size": True}, "world_size"),
        (Echo, {"world_size": 2, "layout": {"tensor": 0}}, "tensor"),
        (Echo, {"launch": {"rank_kwargs": [{}]}}, "launch.rank_kwargs"),
        (Echo, {"launch": {"rank_env": [{}]}}, "launch.rank_env"),
        (Echo, {"launch": {"env": {"A": 1}}}, "launch.env['A']"),
        (Echo, {"launch": {"env": {"A=": "1"}}}, "launch.env"),
        (Echo, {"limits": {"start": 0}}, "limits.start"),
        (Echo, {"limits": {"queue_depth": 0}}, "limits.queue_depth"),
        (Echo, {"limits": {"begin": 1}}, "limits.begin"),
        (Echo, {"limits": 3}, "limits"),
        (Echo, {"launch": "magic"}, "launch.method"),
        (Echo, {"launch": "inline"}, "world_size"),
        (Echo, {"world_size": 1, "launch": {"method": "inline", "env": {"A": "1"}}}, "launch.env"),
        (
            Echo,
            {"world_size": 1, "launch": {"method": "inline", "rank_env": [{}]}},
            "launch.rank_env",
        ),
        (Echo, {"world_size": 1, "launch": "inline", "standby": 1}, "standby"),
        (Echo, {"policy": {"restart": "always"}}, "policy.restart"),
        (Echo, {"intensity": (3,)}, "intensity"),
        (Echo, {"intensity": (-1, 5.0)}, "intensity"),
        (Echo, {"standby": -1}, "standby"),
        (Echo, {"standby": 1.5}, "standby"),
        (Echo, {"standby": True}, "standby"),
        (Echo, {"policy": {"decider": "restart"}}, "policy.decider"),
        (Echo, {"policy": {"survivors": "some"}}, "policy.survivors"),
        (Echo, {"policy": {"survivors": "keep"}}, "policy.survivors"),  # it has no `on_reform`
        (Echo, {"policy": {"survivors": "keep"}, "strategy": "one_for_one"}, "policy.survivors"),
        (Echo, {"policy": {"leave_within": 0}}, "policy.leave_within"),
        (Echo, {"hang_after": 0}, "hang_after"),
        (Echo, {"hang_after": "soon"}, "hang_after"),
        (Echo, {"limits": {"stopped": -1.0}}, "limits.stopped"),
        (Echo, {"limits": {"stopped": float("nan")}}, "limits.stopped"),
        (AsyncHook, {}, "worker"),
        (YieldingHook, {}, "worker"),
        (HasContext, {}, "worker"),
        (Echo, {"launch": {"preload": "torch"}}, "launch.preload"),
        (Echo, {"name": ""}, "name"),
        (Echo, {"devices": ["a"]}, "devices"),
    ],
)
def test_a_spec_that_makes_no_sense_names_field_and_value(
    make: Make, worker: Any, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(SpecError) as caught:
        make(worker, **options)

    assert caught.value.field == field


@pytest.mark.parametrize(
    ("options", "field", "told"),
    [
        ({"strategy": "one_for_al"}, "strategy", "one_for_one, one_for_all, rest_for_one"),
        ({"intensity": 3}, "intensity", "give an Intensity"),
        ({"limits": {"stop": 3}}, "limits.stop", "give a StopPolicy"),
        (
            {"world_size": 5, "layout": {"tensor": 2, "pipeline": 2}},
            "world_size",
            r"tensor 2 x pipeline 2 x prefill_context 1 = 4",
        ),
    ],
)
def test_an_error_lists_the_choices(
    make: Make, options: dict[str, Any], field: str, told: str
) -> None:
    with pytest.raises(SpecError, match=told) as caught:
        make(Echo, **options)

    assert caught.value.field == field


@pytest.mark.parametrize("launch", ["zygote", "inline"])
def test_an_argument_that_cannot_travel_is_named(make: Make, launch: str) -> None:
    ex = make(Echo, 1, launch=launch)

    with pytest.raises(NotPicklable, match=r"^args\[1\]=.*lock"):
        ex.collective_rpc("gated", args=("/gate", threading.Lock()))
    with pytest.raises(NotPicklable, match=r"^kwargs\['value'\]=.*lock"):
        ex.collective_rpc("echo", kwargs={"value": threading.Lock()})
    with pytest.raises(NotPicklable, match=r"args\[0\] of echo is a future: pass its result\(\)"):
        ex.collective_rpc("echo", args=(concurrent.futures.Future[int](),))


@pytest.mark.parametrize(
    ("worker", "says", "cause"),
    [
        (Eager, r"ctx is set after __init__ .* on_start", AttributeError),
        (LateAsyncHook, "on_start returned a coroutine", TypeError),
    ],
)
def test_a_start_that_can_only_fail_says_why(
    make: Make, worker: type[WorkerActor], says: str, cause: type[Exception]
) -> None:
    with pytest.raises(StartFailed, match=says) as caught:
        make(worker, 1)

    assert isinstance(caught.value.__cause__, cause)


def test_a_module_that_builds_an_executor_when_a_worker_imports_it_is_told(
    tmp_path: Path, phalanx_leak_check: None
) -> None:
    (tmp_path / "unguarded.py").write_text(
        "from phalanx import Executor, WorkerActor\n"
        "class Worker(WorkerActor):\n"
        "    def run(self): pass\n"
        "Executor(Worker, 2, devices='cpu', launch={'preload': ()})\n"
    )

    done = run_python("-c", "import unguarded", cwd=tmp_path)

    assert done.returncode == 1
    assert "StartFailed" in done.stderr
    assert "an executor of Worker is built whenever its module is imported" in done.stderr
    assert 'if __name__ == "__main__":' in done.stderr


def test_what_the_constructor_cannot_be_given_is_told_before_anything_starts(make: Make) -> None:
    with pytest.raises(NotPicklable, match=r"kwargs\['lock'\]"):
        make(kwargs={"lock": threading.Lock()})
    with pytest.raises(NotPicklable, match=r"rank_kwargs\[1\]"):
        make(launch=Launch(rank_kwargs=[{}, {"lock": threading.Lock()}]))
    with pytest.raises(BadArguments, match="unexpected keyword argument 'nope'"):
        make(StartFails, 1, kwargs={"how": "raise", "nope": 1})


LIMITED = """
import os, resource, tempfile, time
from phalanx import Executor, WorkerActor
from phalanx.errors import SpecError

class Counting(WorkerActor):
    def limit(self):
        import resource
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

def children(task):
    try:
        return open(f"/proc/self/task/{task}/children").read().split()
    except FileNotFoundError:
        return ["of a thread that has ended"]

def left():
    tasks = os.listdir("/proc/self/task")
    return (
        len(os.listdir("/proc/self/fd")), len(tasks), sum(map(children, tasks), []),
        os.listdir(tempfile.gettempdir()), os.listdir("/dev/shm"),
    )

def served(limit, ranks):
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, 64), limit))
    before = left()
    try:
        with Executor(Counting, ranks, launch={'preload': ()}) as ex:
            found = ex.collective_rpc("limit")
            ex.restart()
            assert found == ex.collective_rpc("limit")
    except SpecError as error:
        assert error.field == "world_size", error
        found = str(error)
    end = time.monotonic() + 10  # a thread that has ended is listed for a moment
    while left() != before:
        assert time.monotonic() < end, (limit, before, left())
    return found

for each in ((1000, 4), (999, 60), (80, 2), (63, 1), (24, 1)):
    print(served(*each))
"""


def test_an_executor_has_the_descriptors_it_needs_or_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    done = run_python("-c", LIMITED, env=environ)

    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    # Each rank has the soft limit that its driver had, and no more.
    assert (told[0], told[3]) == ("[64, 64, 64, 64]", "[63]")
    refused = [told[at] for at in (1, 2, 4)]
    needed = [text.partition(" descriptors")[0] for text in refused]
    assert needed == ["world_size=60: 1474", "world_size=2: 82", "world_size=1: 58"]
    fits = [text.partition("enough for ")[2].partition(" ")[0] for text in refused]
    assert fits == ["40", "1", "0"]
    assert all("ulimit -Hn" in text for text in refused)


def test_arguments_that_cannot_travel_to_one_rank_hold_no_memory(make: Make) -> None:
    ex = make(world_size=2)

    with pytest.raises(NotPicklable):
        ex.scatter("echo", args=[(bytearray(1_000_000),), (threading.Lock(),)])

    assert not any(extent.kept for extent in ex._group.plane.arena._used)


_LOSES_ITS_EVENT_LOOP = """
import os, threading, time
from pathlib import Path
from phalanx import Executor
from phalanx.errors import RuntimeFault
from tests.support.workers import Echo

ex = Executor(Echo, 1, launch={"preload": ()})
calls = [ex.call(lambda _: time.sleep(600), rank=0, non_block=True) for _ in range(2)]
for call in calls:
    call.add_done_callback(lambda _: None)  # the event loop reads for it
loop = ex._group.runtime.loop
held, release = threading.Event(), threading.Event()

def lose():
    # Put in its place, not closed: its number would be the next file's of any thread.
    os.dup2(os.open(os.devnull, os.O_RDONLY), loop._epoll.fileno())
    held.set()
    release.wait(30)

loop.post(lose)
held.wait(30)
try:
    calls[0].result(timeout=0.1)
except TimeoutError:
    print("a caller came before the loop had noticed", flush=True)
release.set()
for call in calls:
    try:
        call.result()
    except RuntimeFault as error:
        print(error, flush=True)
ex.close()
print("children:", Path("/proc/self/task", str(os.getpid()), "children").read_text())
os._exit(0)
"""


def test_without_the_event_loop_calls_end_and_say_why_and_close_waits_for_no_deadline() -> None:
    # Deadlines of half a minute stand behind a `close` that waits for deaths which nothing tells.
    ended = run_python("-c", _LOSES_ITS_EVENT_LOOP, timeout=30)

    assert ended.returncode == 0, ended.stderr
    told = ended.stdout
    assert told.count("a caller came before the loop had noticed") == 1
    assert told.count("the event loop of this process has ended") == 2
    assert told.splitlines()[-1] == "children: "
