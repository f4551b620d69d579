"""Invariants of groups: restarts, deaths, leaks.

Times are compared with a tolerance if two processes took them, or if a window's edge decides.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, TypeVar

from phalanx.chaos.history import events as ev

if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx.chaos.history.history import History

    from .checker import Findings

_EDGE = 0.25  # seconds by which the time of a death in a report may differ from the one counted
_TICKS = 0.02  # seconds by which a process may look older than it is
_NOTICE = 10.0  # seconds in which a death must be known; it takes milliseconds on an idle machine
_WARM = 10  # calls in which a worker opens what it needs, and within which counts differ
_MOST_DESCRIPTORS = 64  # arbitrary; libraries open some when they are first used
_THAW = 2.0  # seconds in which a node ends that was frozen for longer than its lease
_NODE = re.compile(r"node \d+ \(.*?\) was lost")  # in the reason of its ranks' deaths
D = TypeVar("D", bound=ev.Event)
_FOR_GOOD = ("give up", "stop the group")
_DECIDED = "by the decider: stop the group"  # whatever the intensity
_FORMED_ANEW = ("out of step", "process group is broken")  # in the reason of a death


def strategy(history: History) -> Findings:
    """A death restarts the ranks that the strategy names, no more and no fewer."""
    for group, built in history.groups.items():
        events = history.by_group[group]
        yield from _too_many(built, events)
        if not history.is_excused(built):
            yield from _too_few(built, events)


def _too_many(built: ev.GroupBuilt, events: Sequence[ev.Event]) -> Findings:
    """Find ranks that were restarted without a cause."""
    size = built.world_size
    latest: dict[int, ev.RankStarted] = {}
    ready: set[int] = set()
    causes: dict[int, list[ev.Event]] = defaultdict(list)
    deaths: list[ev.RankDied] = []
    for event in events:
        match event:
            case ev.RankDied(rank=int(dead)):
                deaths.append(event)
                taken = tied(built, dead, size, event.reason)
                # A rank that is starting does not re-form: it is restarted with the dead one.
                if built.survivors == "keep":
                    taken |= set(range(size)) - (set[int]() if takes_kept(built, event) else ready)
                for rank in taken:
                    causes[rank].append(event)
                ready.discard(dead)
            case ev.RanksNotStarted():
                taken = set[int]().union(*(tied(built, rank, size) for rank, _ in event.ranks))
                if built.survivors == "keep":
                    taken |= set(range(size)) - ready
                for rank in taken:
                    causes[rank].append(event)
            case ev.ChangePlanned():
                size = event.world_size or size
                for rank in range(size) if event.world_size else event.ranks:
                    for each in tied(built, rank, size):
                        causes[each].append(event)
            case ev.RankReady():
                ready.add(event.rank)
            case ev.RankStarted():
                before = latest.get(event.rank)
                if before is not None and not causes[event.rank]:
                    text = f"rank {event.rank} of {built.group} was restarted, for which"
                    shown = (before, *deaths[-1:], event)
                    yield f"{text} {built.strategy} had no cause", shown
                latest[event.rank] = event
                # Restarts of one_for_one have the epoch of the death before them. Otherwise a
                # death of the new epoch was decided on later, and recorded earlier.
                causes[event.rank] = [
                    each
                    for each in causes[event.rank]
                    if isinstance(each, ev.RankDied)
                    and each.epoch >= event.epoch
                    and built.strategy != "one_for_one"
                ]
                ready.discard(event.rank)
            case _:
                pass


def _too_few(built: ev.GroupBuilt, events: Sequence[ev.Event]) -> Findings:
    """Find groups that served again with a rank that should have been restarted."""
    size = built.world_size
    incarnations: dict[int, int] = {}
    due: dict[int, tuple[ev.RankDied, int]] = {}  # rank: the death, and the incarnation to replace
    for event in events:
        match event:
            case ev.RankStarted():
                incarnations[event.rank] = event.incarnation
                if event.rank in due and event.incarnation > due[event.rank][1]:
                    del due[event.rank]
            case ev.ChangePlanned(world_size=int(wanted)):
                size = wanted
                due = {rank: owed for rank, owed in due.items() if rank < size}
            case ev.RankDied(rank=int(dead)):
                if any(word in event.decision for word in _FOR_GOOD):
                    due.clear()
                    continue
                for rank in tied(built, dead, size, event.reason):
                    due[rank] = (event, incarnations.get(rank, 0))
            case ev.GroupUp():
                for rank, (died, incarnation) in sorted(due.items()):
                    text = f"{built.group} served again with incarnation {incarnation} of rank"
                    text = f"{text} {rank}, which {built.strategy} restarts with rank {died.rank}"
                    yield text, (died, event)
                due.clear()
            case _:
                pass


def tied(built: ev.GroupBuilt, rank: int, size: int, reason: str = "") -> set[int]:
    """Return the ranks that are restarted with *rank*, which ended for *reason*."""
    if built.survivors == "keep":
        return {rank}
    if built.strategy == "one_for_all" or any(each in reason for each in _FORMED_ANEW):
        return set(range(size))
    return set(range(rank, size)) if built.strategy == "rest_for_one" else {rank}


def takes_kept(built: ev.GroupBuilt, died: ev.RankDied) -> bool:
    """Whether a rank *died* that had just been started, and takes along those that are kept."""
    return built.survivors == "keep" and died.decision.startswith("restart ranks ")


def lost_node(reason: str) -> str:
    """Return what names the node whose loss is the *reason* of a death; empty if none is."""
    found = _NODE.search(reason)
    return "" if found is None else found[0]


def lost_with(history: History, died: ev.RankDied) -> set[int]:
    """Return the ranks that were lost with a node, or the one that *died* by itself."""
    node = lost_node(died.reason)
    reports = history.every(ev.RankDied) if node else (died,)
    of_group = (each for each in reports if each.group == died.group)
    return {e.rank for e in of_group if e.rank is not None and lost_node(e.reason) == node}


def intensity(history: History) -> Findings:
    """A group gives up when its intensity is exceeded, and not before."""
    ready = {each.worker for each in history.every(ev.RankReady)}
    for group, built in history.groups.items():
        counted: list[ev.RankDied] = []
        maybe: list[ev.Event] = []
        over: tuple[ev.RankDied, ...] = ()
        served = whole = is_meant = False
        limit = f"deaths in {built.period:g} s; the limit is {built.intensity}"
        for event in history.by_group[group]:
            match event:
                case ev.GroupUp():
                    served = whole = True
                case ev.RankDied(rank=int(rank)) if served:
                    is_meant = is_meant or _DECIDED in event.decision
                    # Survivors that die while they are re-formed belong to the death before.
                    who = group, rank, event.incarnation
                    if built.survivors == "keep" and not whole and who in ready:
                        continue
                    whole = False
                    node = lost_node(event.reason)
                    if counted and node and node == lost_node(counted[-1].reason):
                        continue  # the loss of a node is one death
                    counted.append(event)
                    recent = _within(counted, event.at, built.period - _EDGE)
                    if not over and len(recent) > built.intensity:
                        over = recent
                case ev.RanksNotStarted(ranks=ranks) if served:
                    # Which of them count depends on the strategy: at most all.
                    maybe += [event] * len(ranks)
                case ev.RankStarted() if over and _is_after(event, over[-1]):
                    yield f"{group} went on after {len(over)} {limit}", (built, *over, event)
                    break
                case ev.GroupEnded(cause=cause) if cause and served and not is_meant:
                    near = _within([*counted, *maybe], event.at, built.period + 2 * _EDGE)
                    if built.restart == "permanent" and len(near) <= built.intensity:
                        yield f"{group} gave up after {len(near)} {limit}", (built, *near, event)
                case _:
                    pass


def _is_after(started: ev.RankStarted, death: ev.RankDied) -> bool:
    """Whether *started* was decided on after *death*, rather than just before it was known."""
    restarted = started.rank == death.rank and started.incarnation > death.incarnation
    return restarted or started.at > death.at + _EDGE


def _within(deaths: Sequence[D], now: float, period: float) -> tuple[D, ...]:
    return tuple(died for died in deaths if now - died.at <= period)


def death_first(history: History) -> Findings:
    """A rank is restarted only after the previous process and all its descendants have exited."""
    for started in history.every(ev.WorkerStarted):
        if started.outlived:
            text = f"rank {started.rank} of {started.group} (incarnation {started.incarnation})"
            pids = ", ".join(map(str, started.outlived))
            yield f"{text} started beside pid {pids} of an earlier incarnation", (started,)
    exited = {each.worker: each for each in history.every(ev.RankExited)}
    # When the process was started; a standby is older than what it replaces.
    since = {
        each.worker: each.at - each.age + _TICKS
        for each in history.every(ev.WorkerStarted)
        if not each.kept and not history.groups[each.group].standby
    }
    latest: dict[tuple[str, int], ev.RankStarted] = {}
    for event in history.every(ev.RankStarted):
        before = latest.get((event.group, event.rank))
        latest[event.group, event.rank] = event
        end = None if before is None else exited.get(before.worker)
        began = min(event.at, since.get(event.worker, event.at))
        if before is not None and (end is None or end.at > began):
            text = f"rank {event.rank} of {event.group} was started as incarnation"
            text = f"{text} {event.incarnation} before the exit of {before.incarnation} was known"
            yield text, (before, event, *([] if end is None else [end]))


def one_incarnation(history: History) -> Findings:
    """No two incarnations of a rank on a node run at once, by what they have written themselves.

    One whose node was frozen for longer than its lease is replaced meanwhile, and ends when it is
    thawed.
    """
    latest: dict[tuple[str, int], ev.RankRan] = {}
    for new in history.every(ev.RankRan):
        old = latest.setdefault((new.group, new.rank), new)
        overlap = min(old.at + old.seconds, new.at + new.seconds) - new.at
        if old is not new and overlap > 0 and not _is_thawed(history, old, new):
            text = f"rank {new.rank} of {new.group} ran as incarnation {old.incarnation} and as"
            yield f"{text} {new.incarnation} at once, for {overlap:.2f} s", (old, new)
        if new.at + new.seconds > old.at + old.seconds:
            latest[new.group, new.rank] = new


def _is_thawed(history: History, old: ev.RankRan, new: ev.RankRan) -> bool:
    """Whether *new* started while *old* was frozen, and that ended soon after."""
    return any(
        each.at <= new.at and old.at + old.seconds <= each.at + (each.seconds or 0.0) + _THAW
        for each in history.every(ev.FaultInjected)
        if each.fault == "freeze"
        and (each.group, each.rank) == (old.group, old.rank)
        and each.incarnation in (old.incarnation, None)  # None: it was starting
    )


def deaths_known(history: History) -> Findings:
    """Every exit of a rank becomes known, soon, and no live rank is taken for dead."""
    exited = {each.worker: each for each in history.every(ev.RankExited)}
    for started in history.every(ev.RankStarted):
        if started.worker not in exited and not history.is_excused(started):
            text = f"the exit of rank {started.rank} of {started.group}"
            yield f"{text} (incarnation {started.incarnation}) never became known", (started,)
    for injected in history.every(ev.FaultInjected):
        if not injected.lethal or injected.rank is None or injected.incarnation is None:
            continue
        if injected.fault == "term":
            continue  # its `on_stop` may take longer
        end = exited.get((injected.group, injected.rank, injected.incarnation))
        if end is None or lost_node(end.reason) or history.is_excused(injected):
            continue  # that it is lost may be known at the end of its lease only
        if end.at - injected.at > _NOTICE:
            text = f"the exit of rank {injected.rank} of {injected.group} became known only"
            yield f"{text} {end.at - injected.at:.1f} s after it", (injected, end)
    for began in history.every(ev.CallBegan):
        end = exited.get(began.worker)
        # A node that is lost may run until it is fenced: see `one_incarnation`.
        if end is not None and began.at > end.at and not lost_node(end.reason):
            text = f"rank {began.rank} of {began.group} was taken for dead and ran call"
            yield f"{text} {began.call}", (end, began)


def fresh_rendezvous(history: History) -> Findings:
    """The ranks of an epoch have one rendezvous, which no other epoch of the group has."""
    epochs: dict[tuple[str, str], ev.WorkerStarted] = {}
    places: dict[tuple[str, int], ev.WorkerStarted] = {}
    for started in history.every(ev.WorkerStarted):
        if not started.rendezvous:
            continue
        group, place, epoch = started.group, started.rendezvous, started.epoch
        first = epochs.setdefault((group, place), started)
        if first.epoch != epoch:
            yield f"epochs {first.epoch} and {epoch} of {group} share {place}", (first, started)
        other = places.setdefault((group, epoch), started)
        if other.rendezvous != place:
            yield f"epoch {epoch} of {group} has {place} and {other.rendezvous}", (other, started)


def heals(history: History) -> Findings:
    """A group serves again after the last fault; if it has given up, another can be built."""
    for checked in history.every(ev.SteadyStateChecked):
        if not checked.ok and not checked.ended:
            yield f"{checked.group}: {checked.detail}", (checked,)


def right_answers(history: History) -> Findings:
    """The workload's own checks find nothing wrong."""
    for failed in history.every(ev.WorkloadFailed):
        yield failed.error, (failed,)


def nothing_left(history: History) -> Findings:
    """Nothing is left behind, and no worker accumulates descriptors."""
    for leak in history.every(ev.LeakFound):
        yield f"{leak.what} {leak.name}", (leak,)
    warm: dict[tuple[str, int, int], list[ev.CallBegan]] = defaultdict(list)
    for began in history.every(ev.CallBegan):
        if began.descriptors and began.turn > _WARM:
            warm[began.worker].append(began)
    for (group, rank, _), every in warm.items():
        # What is open for a while is in some of these only.
        first = max(every[:_WARM], key=lambda began: began.descriptors)
        last = min(every[-_WARM:], key=lambda began: began.descriptors)
        more = last.descriptors - first.descriptors
        if more > _MOST_DESCRIPTORS:
            text = f"{more} descriptors more in rank {rank} of {group}"
            yield f"{text} after {last.turn - first.turn} calls", (first, last)
