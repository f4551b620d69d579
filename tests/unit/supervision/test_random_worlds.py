"""The rules of supervision hold in random worlds, on the pure core.

A world delivers events to the machine in every order the contract allows: outcomes of starts and
stops may be late, exits race with everything, and children may hang. Each rule is checked as the
actions come.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.supervision import (
    BRUTAL_KILL,
    KILLED,
    AutoShutdown,
    BackOff,
    ChildSpec,
    ExitKind,
    ExitReason,
    Intensity,
    Notice,
    Restart,
    Shutdown,
    Strategy,
    SupervisorSpec,
)
from phalanx.supervision.core.machine import SupervisorMachine
from phalanx.supervision.core.messages import (
    AbandonStart,
    Action,
    Alarm,
    BecomeReady,
    Booted,
    Event,
    Exit,
    Exited,
    KillChild,
    NotStarted,
    Outcome,
    Reply,
    Request,
    Retry,
    StartChild,
    Started,
    StopRequested,
    TerminateChild,
)

REASONS = [
    ExitReason(ExitKind.NORMAL),
    ExitReason(ExitKind.SHUTDOWN),
    ExitReason(ExitKind.CRASH),
    KILLED,
]
SHUTDOWNS: list[Shutdown] = [BRUTAL_KILL, 0.5, 5.0, float("inf")]


def a_start() -> None:
    raise AssertionError("the world starts nothing")


def random_child(random: Random, name: str, *, significant: bool) -> ChildSpec:
    restart = random.choice(list(Restart))
    return ChildSpec(
        name,
        a_start,
        restart=restart,
        shutdown=random.choice(SHUTDOWNS),
        significant=significant and restart is not Restart.PERMANENT and random.random() < 0.6,
        start_within=random.choice([2.0, float("inf")]),
        kill_within=random.choice([1.0, float("inf")]),
    )


def random_spec(random: Random) -> SupervisorSpec:
    strategy = random.choice(list(Strategy))
    dynamic = strategy is Strategy.DYNAMIC
    auto = AutoShutdown.NEVER if dynamic else random.choice(list(AutoShutdown))
    count = {Strategy.SIMPLE_ONE_FOR_ONE: 1, Strategy.DYNAMIC: 0}.get(
        strategy, random.randint(0, 5)
    )
    significant = auto is not AutoShutdown.NEVER
    return SupervisorSpec(
        "top",
        strategy,
        Intensity(random.randint(0, 4), random.choice([1.0, 4.0, 60.0])),
        [random_child(random, f"w{n}", significant=significant) for n in range(count)],
        auto_shutdown=auto,
        max_children=random.choice([None, 2, 5]) if dynamic else None,
        backoff=BackOff(0.1, reset_after=5.0) if random.random() < 0.3 else None,
        fruitless_limit=random.choice([None, None, 2]),
    )


@dataclass
class Process:
    """What one successful start brought; *told* once it was asked or killed."""

    key: str
    serial: int
    spec: ChildSpec
    alive: bool = True
    told: bool = False
    killed: bool = False


@dataclass
class World:
    """One supervisor, its processes and its messages."""

    random: Random
    spec: SupervisorSpec
    now: float = 0.0
    trouble: float = 0.3  # share of starts that fail, and of children that hang
    inbox: deque[Event] = field(default_factory=deque[Event])
    late: list[Event] = field(default_factory=list[Event])  # outcomes under way
    timers: list[tuple[float, Event]] = field(default_factory=list[tuple[float, Event]])
    processes: dict[tuple[str, int], Process] = field(
        default_factory=dict[tuple[str, int], Process]
    )
    starting: tuple[str, int] | None = None
    pending: set[int] = field(default_factory=set[int])
    asked: int = 0
    over: bool = False
    machine: SupervisorMachine = field(init=False)
    twin: SupervisorMachine = field(init=False)
    operation: object = None  # the one that the last start belongs to
    started: list[str] = field(default_factory=list[str])  # and the starts of it

    def __post_init__(self) -> None:
        self.machine = SupervisorMachine(self.spec)
        self.twin = SupervisorMachine(self.spec)
        self.deliver(Booted())

    # --- what happens ---------------------------------------------------------------------

    def alive(self) -> list[Process]:
        return [process for process in self.processes.values() if process.alive]

    def running(self) -> list[Process]:
        """Return those whose start has been delivered: no exit comes before it."""
        on_the_way = {event.serial for event in self.late if isinstance(event, Started)}
        return [process for process in self.alive() if process.serial not in on_the_way]

    def deliver(self, event: Event) -> None:
        actions = self.machine.handle(event, self.now)
        same = self.twin.handle(event, self.now)
        assert repr(same) == repr(actions), "the same events lead to the same actions"
        if isinstance(event, Outcome) and self.starting == (event.child, event.serial):
            self.starting = None
        for action in actions:
            self.perform(action)
        self.check()

    def step(self) -> None:
        """Let one random thing happen."""
        self.now += self.random.choice([0.0, 0.0, 0.1, 0.7, 3.0])
        self.ring()
        roll = self.random.random()
        if self.late and roll < 0.45:
            self.deliver(self.late.pop(self.random.randrange(len(self.late))))
        elif self.inbox and roll < 0.75:
            self.deliver(self.inbox.popleft())
        elif roll < 0.85 and self.running():
            self.end(self.random.choice(self.running()), self.random.choice(REASONS))
        else:
            self.inbox.append(self.request())

    def ring(self) -> None:
        due = [entry for entry in self.timers if entry[0] <= self.now]
        self.timers = [entry for entry in self.timers if entry[0] > self.now]
        for _, event in due:
            self.inbox.append(event)

    def request(self) -> Event:
        self.asked += 1
        caller = self.asked
        self.pending.add(caller)
        keys = [*self.machine.children, "nobody", "w#1", "new"]
        key = self.random.choice(keys)
        name = self.random.choice(["new", "newer", "w0"])
        spec = random_child(self.random, name, significant=True)
        if self.spec.strategy is Strategy.SIMPLE_ONE_FOR_ONE:
            start = Request(caller, lambda machine: machine.start_child(None))
        else:
            start = Request(caller, lambda machine: machine.start_child(spec))
        choices: list[Event] = [
            start,
            start,
            start,
            Request(caller, lambda machine: machine.terminate_child(key)),
            Request(caller, lambda machine: machine.terminate_child(key)),
            Request(caller, lambda machine: machine.restart_child(key)),
            Request(caller, lambda machine: machine.delete_child(key)),
            Request(caller, lambda machine: machine.child_spec(key)),
            Request(caller, SupervisorMachine.child_rows),
            Request(caller, SupervisorMachine.counts),
        ]
        return self.random.choice(choices)

    def end(self, process: Process, reason: ExitReason) -> None:
        process.alive = False
        self.inbox.append(Exited(process.key, process.serial, reason))

    def settle(self) -> None:
        """Let everything come to its end: nothing new happens, time passes."""
        self.trouble = 0.0
        for _ in range(20_000):
            if self.late:
                self.deliver(self.late.pop(0))
            elif self.inbox:
                self.deliver(self.inbox.popleft())
            elif self.timers:
                self.now = max(self.now, min(at for at, _ in self.timers))
                self.ring()
            else:
                return
        raise AssertionError("the tree does not come to rest")

    # --- what is done, and the rules about it ---------------------------------------------

    def perform(self, action: Action) -> None:
        assert not self.over or isinstance(action, Reply), f"{action} after the end"
        match action:
            case StartChild(key, serial, _, spec):
                self.on_start(key, serial, spec)
            case TerminateChild(key, serial) | KillChild(key, serial):
                self.on_stop(key, serial, kill=isinstance(action, KillChild))
            case AbandonStart(key, serial):
                assert self.starting == (key, serial), "only a start under way is abandoned"
                self.starting = None
                self.late = [e for e in self.late if getattr(e, "serial", 0) != serial]
                if (key, serial) in self.processes:
                    self.processes[key, serial].alive = False  # whoever performs it kills it
            case Retry(attempt=attempt):
                if self.spec.backoff is not None and attempt:
                    delay = self.spec.backoff.delay(attempt, self.random.random())
                    self.timers.append((self.now + delay, action))
                else:
                    self.inbox.append(action)
            case Alarm(delay=delay):
                self.timers.append((self.now + delay, action))
            case Reply(caller):
                assert caller in self.pending, "one answer per request"
                self.pending.remove(caller)
            case Exit():
                self.over = True
                assert not [p for p in self.alive() if not p.killed], "children outlive it"
            case BecomeReady() | Notice():
                pass

    def on_start(self, key: str, serial: int, spec: ChildSpec) -> None:
        assert self.starting is None, "one start at a time"
        running = [p for p in self.alive() if p.key == key and not p.killed]
        assert not running, f"two living incarnations of {key}"
        if self.machine._operation is not self.operation:
            self.operation, self.started = self.machine._operation, []
        self.started.append(key)
        order = list(self.machine.children)
        known = [order.index(k) for k in self.started if k in order]  # an ignored one may be gone
        assert known == sorted(known), "children start in start order"
        self.starting = (key, serial)
        roll = self.random.random()
        if roll < self.trouble * 0.6:
            self.late.append(NotStarted(key, serial, RuntimeError("no")))
        elif roll < self.trouble * 0.8:
            self.late.append(NotStarted(key, serial))
        elif roll < self.trouble and spec.start_within != float("inf"):
            pass  # it hangs; the alarm ends it
        else:
            self.processes[key, serial] = Process(key, serial, spec)
            self.late.append(Started(key, serial))

    def on_stop(self, key: str, serial: int, *, kill: bool) -> None:
        process = self.processes[key, serial]
        if not process.told:
            brutal = process.spec.shutdown is BRUTAL_KILL
            assert kill == brutal, "asked first, unless its shutdown is brutal"
            if not self.spec.strategy.has_instances:
                others = [p for p in self.alive() if p.told and p is not process and not p.killed]
                assert not others, "one stop at a time"
        process.told = True
        if not process.alive:
            return  # its exit is on its way
        limited = process.spec.stop_within != float("inf")
        hangs = not kill and limited and self.random.random() < self.trouble
        lost = kill and process.spec.kill_within != float("inf") and self.random.random() < 0.2
        process.killed = kill
        if not (hangs or lost):
            process.alive = False
            reason = KILLED if kill else self.random.choice(REASONS)
            self.late.append(Exited(key, serial, reason))

    def check(self) -> None:
        """Check what holds between any two events."""
        window = self.machine.window
        assert len(window.spent) <= self.spec.intensity.max_restarts
        if self.machine.ended is not None:
            assert self.machine.is_idle


worlds = st.integers(0, 2**48)


@settings(max_examples=500)
@given(seed=worlds, steps=st.integers(0, 120), stopped=st.booleans())
def test_a_world_keeps_the_rules_and_comes_to_rest_and_a_stopped_one_to_its_end(
    seed: int, steps: int, stopped: bool
) -> None:
    random = Random(seed)
    world = World(random, random_spec(random))
    for _ in range(steps):
        world.step()

    if stopped:
        world.inbox.append(StopRequested(ExitReason(ExitKind.SHUTDOWN)))
    world.settle()

    assert world.pending == set(), "every request is answered"
    assert world.machine.is_idle
    if stopped:
        assert world.machine.ended is not None
        assert world.over
        assert [p for p in world.alive() if not p.killed] == []


@settings(max_examples=300)
@given(
    limit=st.integers(0, 6),
    period=st.floats(0.1, 10),
    gaps=st.lists(st.floats(0, 12), max_size=40),
)
def test_no_window_ever_holds_more_restarts_than_the_intensity(
    limit: int, period: float, gaps: list[float]
) -> None:
    window = Intensity(limit, period).window()
    now, admitted = 0.0, list[float]()
    for gap in gaps:
        now += gap
        after = window.admit(now)
        if after is not None:
            window = after
            admitted.append(now)

    # Any period that ends with an admitted restart, both ends counted.
    for last in admitted:
        inside = [at for at in admitted if at <= last and last - at <= period]
        assert len(inside) <= limit
