"""A simulated kernel for one thread: virtual time, fake processes, channels in memory.

`Simulation` runs actors, timers, launches and fake workers in one order, and moves its clock to the
next timer when nothing else is left to do. Each step is the same in every run.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from phalanx.runtime import (
    Arrival,
    DevicePool,
    Frame,
    Kind,
    Payload,
    ProgressPage,
    Vitals,
    encode,
)
from phalanx.runtime.memory.arena import Borrower
from phalanx.runtime.observe.crash_report import ExitEvidence
from phalanx.runtime.output.collector_client import LastOutput
from phalanx.runtime.wire.packet_decoder import unbundle, unpack
from phalanx.runtime.wire.progress_page import _BEGUN_AT

START, CALL = 0.5, 0.01  # seconds that a start and a call take
HANGS = object()  # what a function returns whose call never ends


class Timer:
    def __init__(self, at: float, number: int, callback: Callable[[], object]) -> None:
        self.at = at
        self.number = number
        self.callback: Callable[[], object] | None = callback

    @property
    def is_pending(self) -> bool:
        return self.callback is not None

    def cancel(self) -> None:
        self.callback = None

    __call__ = cancel  # a supervision tree calls what its timers return


class Watch:
    def __init__(self, loop: Simulation, fd: int, events: int, callback: Any) -> None:
        self.fd, self.events, self.callback = fd, events, callback
        self._loop = loop

    def modify(self, events: int) -> None:
        self.events = events

    def cancel(self) -> None:
        self._loop.watches.pop(self, None)


class Simulation:
    """The event loop, and what runs beside it; see the module."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.watches: dict[Watch, None] = {}
        self.sources: dict[int, Any] = {}  # behind simulated descriptors
        self._timers: list[Timer] = []
        self._jobs: deque[Callable[[], object]] = deque()
        self._actors: list[Any] = []
        self._numbers = iter(range(10**6, 10**9))

    # --- the event loop, timers and clock -------------------------------------------------

    def time(self) -> float:
        return self.now

    def is_inside(self) -> bool:
        return False

    def is_current(self) -> bool:
        return False

    def call_at(self, at: float, callback: Callable[[], object]) -> Timer:
        timer = Timer(at, next(self._numbers), callback)
        self._timers.append(timer)
        return timer

    def watch(self, fd: int, events: int, callback: Callable[[int], None]) -> Watch:
        watch = Watch(self, fd, events, callback)
        self.watches[watch] = None
        return watch

    def post(self, callback: Callable[[], object]) -> None:
        self._jobs.append(callback)

    def when_lost(self, _callback: Callable[[str], None]) -> Callable[[], None]:
        return lambda: None

    # --- threads --------------------------------------------------------------------------

    def begin(self, actor: Any) -> None:
        """Run *actor* without a thread."""
        self._actors.append(actor)
        self.post(actor.on_start)

    def spawn(self, target: Callable[[], None], _name: str) -> Callable[[float], bool]:
        self.post(target)
        return lambda _timeout: True

    # --- running --------------------------------------------------------------------------

    def run_until(self, condition: Callable[[], bool], seconds: float = 120.0) -> None:
        """Run until *condition* holds; it must within so many virtual seconds."""
        limit = self.now + seconds
        while not condition():
            if not (self._run_job() or self._run_watch() or self._run_actor()):
                self._run_timer(limit)

    def _run_job(self) -> bool:
        if self._jobs:
            self._jobs.popleft()()
            return True
        return False

    def _run_watch(self) -> bool:
        for watch in list(self.watches):
            if watch.events and (events := self.events(watch.fd) & watch.events):
                watch.callback(events)
                return True
        return False

    def _run_actor(self) -> bool:
        for actor in self._actors:
            if not actor.actor_inbox.empty():
                actor._handle_receive(actor.actor_inbox.get().message)
                if actor.actor_stopped.is_set():
                    self._actors.remove(actor)
                    actor._actor_loop_teardown()
                return True
        return False

    def _run_timer(self, limit: float) -> None:
        timers = [timer for timer in self._timers if timer.callback is not None]
        assert timers, "nothing is left to do, and the condition does not hold"
        self._timers = sorted(timers, key=lambda timer: (timer.at, timer.number))
        timer = self._timers.pop(0)
        assert timer.at <= limit, f"the condition does not hold in time; next: {timer.callback}"
        self.now = max(self.now, timer.at)
        callback, timer.callback = timer.callback, None
        assert callback is not None
        callback()

    # --- descriptors ----------------------------------------------------------------------

    def open(self, source: Any) -> int:
        fd = next(self._numbers)
        self.sources[fd] = source
        return fd

    def events(self, fd: int) -> int:
        if fd in self.sources:
            found: int = self.sources[fd].events()
            return found
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return sum(events for _, events in poll.poll(0))


class Poller:
    """The poller of one group."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._fd = simulation.open(self)
        self._fds: dict[int, int] = {}
        self._woken = False
        self.woken = (self._fd, select.EPOLLIN)
        self.poll: Any = self._poll

    def fileno(self) -> int:
        return self._fd

    def add(self, fd: int) -> None:
        self._fds[fd] = select.EPOLLIN

    def remove(self, fd: int) -> None:
        self._fds.pop(fd, None)

    def want_to_write(self, fd: int, *, on: bool) -> None:
        assert fd in self._fds
        self._fds[fd] = select.EPOLLIN | (select.EPOLLOUT if on else 0)

    def wake(self) -> None:
        self._woken = True

    def reset(self) -> None:
        self._woken = False

    def close(self) -> None:
        self._fds.clear()

    def events(self) -> int:
        return select.EPOLLIN if self._ready() else 0

    def _ready(self) -> list[tuple[int, int]]:
        ready = [self.woken] if self._woken else []
        for fd, wanted in self._fds.items():
            if events := self._simulation.events(fd) & (wanted | select.EPOLLHUP):
                ready.append((fd, events))
        return ready

    def _poll(self, _timeout: float | None = None, _most: int = 0) -> list[tuple[int, int]]:
        return self._ready()


class Channel:
    """A channel in memory; `cut` ends it after the frames that the driver has not read."""

    def __init__(self, simulation: Simulation, epoch: int) -> None:
        self._simulation = simulation
        self._fd = simulation.open(self)
        self.page = ProgressPage.create()
        self.borrower = Borrower(memoryview(b""))
        self.backed_up = False
        self.unhandled: Frame | None = None
        self.on_packet: Callable[[bytes], None] = lambda _: None
        self.to_driver: deque[bytes] = deque()
        self.is_cut = False
        self.epoch = epoch

    def events(self) -> int:
        return select.EPOLLIN if self.to_driver or self.is_cut else 0

    def cut(self) -> None:
        self.is_cut = True
        self.on_packet = lambda _: None

    # the driver's side

    def fileno(self) -> int:
        return self._fd

    def child_fds(self) -> dict[str, int]:
        return {"data": self._fd}

    def close_child_ends(self) -> None:
        pass

    def send(self, packet: bytes, _file: int | None = None, rest: tuple[bytes, ...] = ()) -> bool:
        packet = b"".join((packet, *rest))
        self.on_packet(packet)
        return True

    def flush(self) -> list[tuple[bytes, OSError]]:
        return []

    def peek(self) -> Frame | Arrival:
        if self.unhandled is None:
            if not self.to_driver:
                return Arrival.END if self.is_cut else Arrival.NOTHING
            self.unhandled = unpack(self.to_driver.popleft(), [])
        return Arrival.FOREIGN if self.unhandled is None else self.unhandled

    def close(self) -> None:
        self._simulation.sources.pop(self._fd, None)
        self.page.close()


class Worker:
    """A fake process: starts, answers calls with `{method: function}`, obeys signals."""

    def __init__(self, machine: Machine, spec: Any, on_exit: Callable[[Any], None]) -> None:
        self.machine = machine
        self.label = spec.label
        self.status: ExitEvidence | None = None
        self.pid = next(machine.pids)
        self._on_exit = on_exit
        self._simulation = simulation = machine.simulation
        self._control = socket.socket(fileno=os.dup(spec.fds["control"]))
        self._channel: Channel = simulation.sources[spec.fds["data"]]
        self._channel.on_packet = self._packet
        self.incarnation = int(spec.label.partition("#")[2])
        simulation.call_at(simulation.now + START, self._ready)
        machine.workers.append(self)

    # what the driver does with a process

    def send_signal(self, number: int) -> bool:
        if self.status is not None:
            return False
        if number in {signal.SIGKILL, signal.SIGTERM}:
            self._exit(ExitEvidence(signal=number))
        return True

    def kill_tree(self, _deadline: float) -> None:
        self.send_signal(signal.SIGKILL)

    def is_stopped(self) -> bool:
        return False

    def vitals(self) -> Vitals:
        return Vitals("S")

    def describe_threads(self) -> str:
        return ""

    def close(self) -> None:
        pass

    # what the process does

    def _exit(self, status: ExitEvidence) -> None:
        if self.status is None:
            self.status = status
            self._channel.cut()
            self._control.close()
            self._simulation.post(partial(self._on_exit, self))

    def _ready(self) -> None:
        if self.status is None:
            self._answer(Kind.HELLO, 0, None)
            packet = Payload.of(None).packet(
                Kind.READY, epoch=self._channel.epoch, call_id=0, incarnation=self.incarnation
            )
            self._control.send(packet)

    def _packet(self, packet: bytes) -> None:
        frame = unpack(packet, [])
        assert frame is not None
        frames = unbundle(frame, None) if frame.kind == Kind.BUNDLE else [frame]
        for each in frames or ():
            self._simulation.call_at(self._simulation.now + CALL, partial(self._serve, each))

    def _serve(self, frame: Frame) -> None:
        if self.status is not None:
            return
        if frame.kind == Kind.STOP:
            self._exit(ExitEvidence(code=0))
        elif frame.kind == Kind.CALL:
            page = self._channel.page
            page.begin(frame.call_id)
            page._words[_BEGUN_AT] = round(self._simulation.now * 1e9)
            method, args, kwargs = frame.value()
            value = getattr(self.machine.served, method)(self, *args, **kwargs)
            if value is HANGS or self.status is not None:
                return
            self._answer(Kind.REPLY, frame.call_id, value)
            page.finish(frame.call_id)

    def answer_late(self) -> None:
        """Answer the call that hangs."""
        page = self._channel.page
        self._answer(Kind.REPLY, page.begun, None)
        page.finish(page.begun)

    def _answer(self, kind: int, call: int, value: Any) -> None:
        payload = Payload.of(None if value is None else encode(value, "the reply"))
        packet = payload.packet(
            kind, epoch=self._channel.epoch, call_id=call, incarnation=self.incarnation
        )
        self._channel.to_driver.append(packet)
        payload.close()


class Spare(Worker):
    """A fake spare, which takes orders and does nothing else."""

    def get_warm(self) -> None:
        if self.status is None:
            self._control.send(Payload.of(None).packet(Kind.STANDBY, epoch=0, call_id=0))

    def get_ready(self) -> None:
        """Be the second incarnation of the rank that it has taken."""
        self.incarnation = 2
        super()._ready()

    def _ready(self) -> None:
        pass


class Log:
    def __getattr__(self, _name: str) -> Callable[..., Log]:
        return lambda *_args, **_named: self


class Output:
    """The output of one fake worker, which writes nothing."""

    stdout = stderr = -1

    def __init__(self) -> None:
        self.faults = os.memfd_create("last-words")

    def child_fds(self) -> dict[str, int]:
        return {}

    def tail(self, _words_end: int | None = None) -> Any:
        return LastOutput(stdout="", stderr="", logs=(), last_words="")

    def label(self, *_args: Any, **_named: Any) -> None:
        pass

    drain = close_child_ends = label

    def close(self) -> None:
        os.close(self.faults)


class Machine:
    """A runtime whose processes are fake workers that serve the functions of *served*.

    Attributes:
        events: What the groups have told, with its virtual time.
        workers: The fake processes, in start order.
        spares: Those of spares.
    """

    reports = None

    def __init__(self, simulation: Simulation, served: type) -> None:
        self.simulation = self.loop = simulation
        self.served = served
        self.pids = iter(range(10**7, 10**8))  # none is a process of this machine
        self.workers: list[Worker] = []
        self.spares: list[Spare] = []
        self.events: list[tuple[float, str, str]] = []
        self.log = Log()
        self.launcher = self.collector = self.status_source = self

    def seams(self) -> dict[str, Any]:
        """Return what a group takes beside its runtime."""
        return {
            "clock": self.simulation.time,
            "jitter": lambda: 0.25,
            "begin": self.simulation.begin,
            "spawn": self.simulation.spawn,
            "channel": self._channel,
            "poller": Poller(self.simulation),
        }

    def _channel(self, _arena: Any, epoch: int) -> Any:
        return Channel(self.simulation, epoch)

    def warm(self, *_preload: Any) -> None:
        pass

    def launch(self, *specs: Any, on_exit: Any, **_limits: Any) -> list[Worker]:
        made = [
            (Spare if "/standby#" in spec.label else Worker)(self, spec, on_exit) for spec in specs
        ]
        self.spares += [each for each in made if isinstance(each, Spare)]
        return made

    def open_worker(self, _labels: Any) -> Output:
        return Output()

    def emit(self, event: Any) -> None:
        who = str(getattr(event, "rank", getattr(event, "path", "")))
        self.events.append((round(self.simulation.now, 3), type(event).__name__, who))

    def devices(self, wanted: Any, world_size: int, per_rank: float = 1) -> DevicePool:
        return DevicePool.of(wanted, world_size, devices_per_rank=per_rank)

    def add(self, _look: Any) -> Callable[[], None]:
        return lambda: None

    def note_end(self, _group: str, _cause: str) -> None:
        pass
