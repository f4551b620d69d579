"""What may not become of groups: of their ranks, their restarts and what they leave.

Guarantees: each rule is a pure function of the history. Times are compared with a tolerance where
two processes took them, or where a window's edge decides.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from .group_records import (
    ChangePlanned,
    GroupEnded,
    GroupUp,
    NotStarted,
    RankDied,
    RankExited,
    RankReady,
    RankStarted,
)
from .referee_records import Complained, Examined, Left, Struck
from .violation import found
from .worker_records import Began, Woke

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .group_records import GroupBuilt
    from .history import History
    from .record import Record
    from .violation import Violation

_EDGE = 0.25  # seconds by which the time of a death in a report may differ from the one counted
_NOTICE = 10.0  # seconds in which a death must be known; it takes milliseconds, the machine may not
_WARM = 10  # calls in which a worker opens what it will need, and within which counts differ
_MOST_DESCRIPTORS = 64  # arbitrary; libraries open some when they are first used
_GONE_FOR_GOOD = ("give up", "stop the group")


def strategy(history: History) -> Iterator[Violation]:
    """Ranks are restarted with those that died as the strategy says: no more and no fewer."""
    for group, built in history.groups.items():
        records = history.by_group[group]
        yield from _too_many(built, records)
        if not history.is_excused(built):
            yield from _too_few(built, records)


def _too_many(built: GroupBuilt, records: Sequence[Record]) -> Iterator[Violation]:
    """A rank was started anew for which there was no cause."""
    size = built.world_size
    latest: dict[int, RankStarted] = {}
    ready: set[int] = set()
    causes: dict[int, list[Record]] = defaultdict(list)
    others: list[RankDied] = []
    for record in records:
        match record:
            case RankDied(rank=int(dead)):
                others.append(record)
                for rank in tied(built, dead, size):
                    causes[rank].append(record)
                if built.survivors == "keep":  # in its start a rank hears nothing of a reform
                    # One that was started in this very restart and cannot join takes all along.
                    told_of_all = record.decision.startswith("restart ranks ")
                    for rank in set(range(size)) - (set() if told_of_all else ready):
                        causes[rank].append(record)
                ready.discard(dead)
            case ChangePlanned():
                size = record.world_size or size
                for rank in range(size) if record.world_size else record.ranks:
                    for each in tied(built, rank, size):
                        causes[each].append(record)
            case RankReady():
                ready.add(record.rank)
            case RankStarted():
                before = latest.get(record.rank)
                if before is not None and not causes[record.rank]:
                    yield found(
                        "strategy",
                        f"rank {record.rank} of {built.group} was started anew, for which "
                        f"{built.strategy} had no cause",
                        (before, *others[-1:], record),
                    )
                latest[record.rank] = record
                causes[record.rank] = _later_than(record, causes[record.rank], built)
                ready.discard(record.rank)
            case _:
                pass


def _later_than(started: RankStarted, causes: Sequence[Record], built: GroupBuilt) -> list[Record]:
    """Return those that *started* did not come of: it was decided on before, and told of later."""
    if built.strategy == "one_for_one":
        return []  # its restarts have the epoch of the death before them
    return [each for each in causes if isinstance(each, RankDied) and each.epoch >= started.epoch]


def _too_few(built: GroupBuilt, records: Sequence[Record]) -> Iterator[Violation]:
    """The group served again with a rank that should have been restarted."""
    size = built.world_size
    incarnations: dict[int, int] = {}
    due: dict[int, tuple[RankDied, int]] = {}  # rank: for whom, and the incarnation that must go
    for record in records:
        match record:
            case RankStarted():
                incarnations[record.rank] = record.incarnation
                if record.rank in due and record.incarnation > due[record.rank][1]:
                    del due[record.rank]
            case ChangePlanned(world_size=int(wanted)):
                size = wanted
                due = {rank: owed for rank, owed in due.items() if rank < size}
            case RankDied(rank=int(dead)):
                if any(word in record.decision for word in _GONE_FOR_GOOD):
                    due.clear()
                    continue
                for rank in tied(built, dead, size):
                    due[rank] = (record, incarnations.get(rank, 0))
            case GroupUp():
                for rank, (died, incarnation) in sorted(due.items()):
                    yield found(
                        "strategy",
                        f"{built.group} served again with incarnation {incarnation} of rank "
                        f"{rank}, which {built.strategy} restarts with rank {died.rank}",
                        (died, record),
                    )
                due.clear()
            case _:
                pass


def tied(built: GroupBuilt, rank: int, size: int) -> set[int]:
    """Return the ranks that are restarted with *rank*."""
    if built.survivors == "keep" or built.strategy == "one_for_one":
        return {rank}
    if built.strategy == "rest_for_one":
        return set(range(rank, size))
    return set(range(size))


def intensity(history: History) -> Iterator[Violation]:
    """A group ends when its intensity is exceeded, and not before."""
    ready = {(each.group, each.rank, each.incarnation) for each in history.every(RankReady)}
    for group, built in history.groups.items():
        counted: list[Record] = []
        maybe: list[Record] = []
        over: tuple[Record, ...] | None = None
        served = False
        whole = False
        for record in history.by_group[group]:
            match record:
                case GroupUp():
                    served = whole = True
                case RankDied(rank=int()) if served:
                    # Survivors that die while they are re-formed belong to the death before.
                    who = record.group, record.rank, record.incarnation
                    if built.survivors == "keep" and not whole and who in ready:
                        continue
                    whole = False
                    counted.append(record)
                    recent = _within(counted, record.at, built.period - _EDGE)
                    if over is None and len(recent) > built.intensity:
                        over = recent
                case NotStarted(ranks=ranks) if served:
                    # With its strategy it depends which of them count: all at the most.
                    maybe += [record] * len(ranks)
                case RankStarted() if over is not None and _is_after(record, over[-1]):
                    yield found(
                        "intensity",
                        f"{group} went on after {len(over)} deaths in {built.period:g} s, where "
                        f"{built.intensity} are allowed",
                        (built, *over, record),
                    )
                    break
                case GroupEnded(cause=cause) if cause and served:
                    recent = _within([*counted, *maybe], record.at, built.period + 2 * _EDGE)
                    if built.restart == "permanent" and len(recent) <= built.intensity:
                        yield found(
                            "intensity",
                            f"{group} gave up after {len(recent)} deaths in {built.period:g} s, "
                            f"where {built.intensity} are allowed",
                            (built, *recent, record),
                        )
                case _:
                    pass


def _is_after(started: RankStarted, death: Record) -> bool:
    """Whether *started* was decided on after *death*, rather than just before it was heard of."""
    assert isinstance(death, RankDied)
    anew = started.rank == death.rank and started.incarnation > death.incarnation
    return anew or started.at > death.at + _EDGE


def _within(deaths: Sequence[Record], now: float, period: float) -> tuple[Record, ...]:
    return tuple(died for died in deaths if now - died.at <= period)


def death_first(history: History) -> Iterator[Violation]:
    """A rank is started anew only when the process before it is gone, with all it had started."""
    for woke in history.every(Woke):
        if woke.outlived:
            yield found(
                "death_first",
                f"rank {woke.rank} of {woke.group} woke as incarnation {woke.incarnation} beside "
                f"pid {', '.join(map(str, woke.outlived))} of an earlier one",
                (woke,),
            )
    exited = {(e.group, e.rank, e.incarnation): e for e in history.every(RankExited)}
    latest: dict[tuple[str, int], RankStarted] = {}
    for started in history.every(RankStarted):
        before = latest.get((started.group, started.rank))
        latest[started.group, started.rank] = started
        if before is None:
            continue
        end = exited.get((before.group, before.rank, before.incarnation))
        if end is None or end.at > started.at:
            yield found(
                "death_first",
                f"rank {started.rank} of {started.group} was started as incarnation "
                f"{started.incarnation} before word of the end of incarnation "
                f"{before.incarnation}",
                (before, started) if end is None else (before, started, end),
            )


def deaths_known(history: History) -> Iterator[Violation]:
    """Every process of a rank ends, its end is known, and that of a lethal fault soon."""
    exited = {(e.group, e.rank, e.incarnation): e for e in history.every(RankExited)}
    for started in history.every(RankStarted):
        key = (started.group, started.rank, started.incarnation)
        if key not in exited and not history.is_excused(started):
            yield found(
                "deaths_known",
                f"nobody ever learnt of the end of rank {started.rank} of {started.group} "
                f"(incarnation {started.incarnation})",
                (started,),
            )
    for struck in history.every(Struck):
        if not struck.lethal or struck.rank is None or struck.incarnation is None:
            continue
        end = exited.get((struck.group, struck.rank, struck.incarnation))
        if end is not None and end.at - struck.at > _NOTICE and not history.is_excused(struck):
            yield found(
                "deaths_known",
                f"the end of rank {struck.rank} of {struck.group} was known only "
                f"{end.at - struck.at:.1f} s after it",
                (struck, end),
            )
    for began in history.every(Began):
        end = exited.get((began.group, began.rank, began.incarnation))
        if end is not None and began.at > end.at:
            yield found(
                "deaths_known",
                f"rank {began.rank} of {began.group} was taken for dead and ran call {began.call}",
                (end, began),
            )


def fresh_rendezvous(history: History) -> Iterator[Violation]:
    """The ranks of an epoch meet at one place, where no other epoch of the group has met."""
    places: dict[str, dict[str, Woke]] = defaultdict(dict)
    epochs: dict[tuple[str, int], Woke] = {}
    for woke in history.every(Woke):
        if not woke.rendezvous:
            continue
        first = places[woke.group].setdefault(woke.rendezvous, woke)
        if first.epoch != woke.epoch:
            yield found(
                "fresh_rendezvous",
                f"epochs {first.epoch} and {woke.epoch} of {woke.group} were to meet at one place",
                (first, woke),
            )
        other = epochs.setdefault((woke.group, woke.epoch), woke)
        if other.rendezvous != woke.rendezvous:
            yield found(
                "fresh_rendezvous",
                f"ranks of epoch {woke.epoch} of {woke.group} were sent to different places",
                (other, woke),
            )


def heals(history: History) -> Iterator[Violation]:
    """A group that has not ended serves again."""
    for examined in history.every(Examined):
        if not examined.ok and not examined.ended:
            yield found("heals", f"{examined.group}: {examined.detail}", (examined,))


def right_answers(history: History) -> Iterator[Violation]:
    """The traffic's own checks found nothing."""
    for complained in history.every(Complained):
        yield found("right_answers", complained.error, (complained,))


def nothing_left(history: History) -> Iterator[Violation]:
    """Nothing is there after the end that was not there before, nor heaps up in a worker."""
    for left in history.every(Left):
        yield found("nothing_left", f"{left.what} {left.name}", (left,))
    turns: dict[tuple[str, int, int], list[Began]] = defaultdict(list)
    for began in history.every(Began):
        if began.descriptors and began.turn > _WARM:
            turns[began.group, began.rank, began.incarnation].append(began)
    for (group, rank, _), every in turns.items():
        # What is open for a while is in some of these only.
        first = max(every[:_WARM], key=lambda began: began.descriptors)
        last = min(every[-_WARM:], key=lambda began: began.descriptors)
        more = last.descriptors - first.descriptors
        if more > _MOST_DESCRIPTORS:
            between = last.turn - first.turn
            text = f"{more} descriptors more in rank {rank} of {group} after {between} calls"
            yield found("nothing_left", text, (first, last))
