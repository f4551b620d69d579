"""What is decided about the ranks of a group, by value."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.supervision import (
    KILLED,
    NORMAL,
    SHUTDOWN,
    BackOff,
    ExitKind,
    ExitReason,
    GroupState,
    Intensity,
    Phase,
    RankState,
    Restart,
    StartRanks,
    Strategy,
    decide,
)

CRASHED = ExitReason(ExitKind.CRASH, code=1)


def effects(actions: tuple[decide.RankAction, ...]) -> tuple[decide.RankAction, ...]:
    return tuple(action for action in actions if not isinstance(action, decide.Decided))


def serving(
    strategy: Strategy,
    size: int = 3,
    intensity: Intensity | None = None,
    restart: Restart = Restart.PERMANENT,
    backoff: BackOff | None = None,
    *,
    keep: bool = False,
) -> GroupState:
    window = (intensity or Intensity(3, 60.0)).window()
    state = GroupState(strategy, window, size, restart=restart, backoff=backoff, keep=keep)
    state, actions = decide.begin(state)
    for rank in range(size):
        state, actions = decide.rank_ready(state, rank, 1, 0.0)
    assert actions == (decide.Serve(1),)
    return state


Event = Callable[[GroupState], decide.RankDecision]


def event(decided: Callable[..., decide.RankDecision]) -> Callable[..., Event]:
    """Return *decided* with the group left open."""
    return lambda *what, **more: lambda state: decided(state, *what, **more)


begin, wait_over = event(decide.begin), event(decide.wait_over)
rank_ready = event(decide.rank_ready)
ranks_exited, close = event(decide.ranks_exited), event(decide.close)
restart, resize = event(decide.restart), event(decide.resize)


def rank_exited(rank: int, incarnation: int, *what: object, **more: object) -> Event:
    return ranks_exited(((rank, incarnation),), *what, **more)


def run(
    state: GroupState, *events: Event
) -> tuple[GroupState, list[tuple[decide.RankAction, ...]]]:
    taken: list[tuple[decide.RankAction, ...]] = []
    for happened in events:
        state, actions = happened(state)
        taken.append(effects(actions))
    return state, taken


def test_an_exit_of_an_earlier_incarnation_is_void() -> None:
    state, _ = run(serving(Strategy.ONE_FOR_ONE), rank_exited(1, 1, KILLED, 1.0))

    assert run(state, rank_exited(1, 1, KILLED, 2.0)) == (state, [()])


def test_the_back_off_grows_and_a_wait_overtaken_by_a_longer_one_starts_nothing() -> None:
    backoff = BackOff(initial=1.0, factor=4.0, maximum=32.0, jitter=0.0)
    state, taken = run(
        serving(Strategy.ONE_FOR_ONE, backoff=backoff),
        rank_exited(1, 1, KILLED, 10.0),
        rank_exited(0, 1, KILLED, 10.5),
        wait_over(11.0),
        wait_over(14.5),
        rank_exited(1, 2, KILLED, 15.0),
    )

    assert taken == [
        (decide.Hold(), decide.WaitUntil(11.0)),
        (decide.Hold(), decide.WaitUntil(14.5)),
        (),
        (StartRanks(1, 3, ((0, 2), (1, 2))),),
        (decide.Hold(), decide.WaitUntil(31.0)),
    ]
    assert state.phase is Phase.WAITING


def test_a_rank_that_was_gone_for_a_while_counts_on() -> None:
    """So no incarnation has a namesake, of which there may still be news."""
    _, taken = run(
        serving(Strategy.ONE_FOR_ALL, size=2),
        resize(1),
        rank_exited(0, 1, SHUTDOWN, 2.0),
        rank_exited(1, 1, SHUTDOWN, 2.0),
        rank_ready(0, 2, 3.0),
        resize(1),
        rank_exited(0, 2, SHUTDOWN, 5.0),
        rank_ready(0, 3, 6.0),
        resize(3),
        rank_exited(0, 3, SHUTDOWN, 8.0),
    )

    assert taken[-1] == (StartRanks(4, 3, ((0, 4), (1, 2), (2, 1))),)


def test_a_death_of_a_rank_that_is_being_reformed_is_not_counted_again() -> None:
    state, taken = run(
        serving(Strategy.ONE_FOR_ALL, keep=True),
        rank_exited(1, 1, KILLED, 1.0),
        rank_exited(2, 1, KILLED, 1.1),
        rank_exited(1, 2, SHUTDOWN, 1.2),
    )

    # The new rank 1 hears nothing in its start, so it goes into the further epoch as another one.
    assert taken[1] == (decide.Hold(), decide.StopRanks((1,), hurry=True))
    assert taken[2] == (decide.ReformRanks(3, ((0, 1),)), StartRanks(3, 3, ((1, 3), (2, 2))))
    assert len(state.window.spent) == 1


@pytest.mark.parametrize(
    ("strategy", "keep", "stopped", "started"),
    [
        (Strategy.ONE_FOR_ONE, False, (), (4, 5, 6, 7)),
        (Strategy.REST_FOR_ONE, False, (), (4, 5, 6, 7)),
        (Strategy.ONE_FOR_ALL, False, (0, 1, 2, 3), tuple(range(8))),
        (Strategy.ONE_FOR_ALL, True, (), (4, 5, 6, 7)),
    ],
)
def test_ranks_that_end_of_one_cause_are_one_restart_and_one_epoch(
    strategy: Strategy, keep: bool, stopped: tuple[int, ...], started: tuple[int, ...]
) -> None:
    lost = [(rank, 1) for rank in (4, 5, 6, 7)]
    state = serving(strategy, 8, Intensity(1, 60.0), keep=keep)
    epoch = state.epoch

    state, (actions,) = run(state, ranks_exited(lost, KILLED, 1.0))
    assert [each.ranks for each in actions if isinstance(each, decide.StopRanks)] == (
        [stopped] if stopped else []
    )
    for rank in stopped:
        state, (actions,) = run(state, rank_exited(rank, 1, SHUTDOWN, 1.1))

    (start,) = (each for each in actions if isinstance(each, StartRanks))
    assert start.ranks == tuple((rank, 2) for rank in started)
    reformed = [each.ranks for each in actions if isinstance(each, decide.ReformRanks)]
    assert reformed == ([tuple((rank, 1) for rank in (0, 1, 2, 3))] if keep else [])
    assert state.epoch == epoch + (strategy is not Strategy.ONE_FOR_ONE)
    assert len(state.window.spent) == 1


def test_a_rank_of_this_very_restart_that_cannot_be_reformed_counts_and_takes_all_along() -> None:
    state, taken = run(
        serving(Strategy.ONE_FOR_ALL, keep=True),
        rank_exited(1, 1, KILLED, 1.0),
        rank_ready(1, 2, 1.1),
        rank_exited(0, 1, CRASHED, 1.2),  # a survivor: free, and the new rank 1 is to be re-formed
        rank_exited(1, 2, CRASHED, 1.3),
    )

    assert taken[2] == (
        decide.Hold(),
        decide.ReformRanks(3, ((1, 2), (2, 1))),
        StartRanks(3, 3, ((0, 2),)),
    )
    assert taken[3] == (decide.Hold(), decide.StopRanks((0, 2), hurry=True))
    assert len(state.window.spent) == 2


@pytest.mark.parametrize("strategy", list(Strategy))
def test_ranks_that_are_out_of_step_are_formed_anew_together_under_any_strategy(
    strategy: Strategy,
) -> None:
    state = serving(strategy)

    state, (actions,) = run(state, rank_exited(2, 1, CRASHED, 1.0, out_of_step=True))

    assert actions == (decide.Hold(), decide.StopRanks((0, 1), hurry=True))
    assert len(state.window.spent) == 1


def test_joining_an_epoch_that_is_over_counts_for_nothing() -> None:
    state, _ = run(
        serving(Strategy.ONE_FOR_ALL, keep=True),
        rank_exited(1, 1, KILLED, 1.0),
        rank_ready(0, 1, 1.1, joined=2),
        rank_exited(1, 2, KILLED, 1.2),
    )

    after, taken = run(state, rank_ready(0, 1, 1.3, joined=2), rank_ready(1, 3, 1.4))

    assert taken == [(), ()]
    assert [rank.state for rank in after.ranks] == ["reforming", "up", "reforming"]


def test_a_planned_restart_of_a_rank_keeps_the_others_where_a_death_does() -> None:
    after, taken = run(
        serving(Strategy.ONE_FOR_ALL, keep=True),
        restart(frozenset({1})),
        rank_exited(1, 1, SHUTDOWN, 2.0),
    )

    assert taken[0] == (decide.Hold(), decide.StopRanks((1,), hurry=False))
    assert taken[1] == (decide.ReformRanks(2, ((0, 1), (2, 1))), StartRanks(2, 3, ((1, 2),)))
    assert not after.window.spent


@pytest.mark.parametrize(
    ("restart", "reason", "restarted"),
    [
        (Restart.PERMANENT, NORMAL, True),
        (Restart.PERMANENT, KILLED, True),
        (Restart.TRANSIENT, NORMAL, False),
        (Restart.TRANSIENT, KILLED, True),
        (Restart.TEMPORARY, NORMAL, False),
        (Restart.TEMPORARY, KILLED, False),
    ],
)
def test_restart_types_are_otps(restart: Restart, reason: object, restarted: bool) -> None:
    state = serving(Strategy.ONE_FOR_ONE, size=1, restart=restart)

    _, (actions,) = run(state, rank_exited(0, 1, reason, 1.0))

    assert any(isinstance(action, StartRanks) for action in actions) == restarted
    assert any(isinstance(action, decide.End) for action in actions) != restarted


@given(
    strategy=st.sampled_from([Strategy.ONE_FOR_ONE, Strategy.ONE_FOR_ALL, Strategy.REST_FOR_ONE]),
    keep=st.booleans(),
    size=st.integers(1, 4),
    picks=st.lists(
        st.tuples(st.frozensets(st.integers(0, 3), min_size=1), st.sampled_from(["die", "ready"])),
        max_size=60,
    ),
)
def test_whatever_dies_whenever_the_group_ends_whole_or_ended(
    strategy: Strategy, keep: bool, size: int, picks: list[tuple[frozenset[int], str]]
) -> None:
    """Every rank has at most one live incarnation; the group quiesces whole, or ended."""
    keep = keep and strategy is Strategy.ONE_FOR_ALL
    state = GroupState(strategy, Intensity(4, 1e9).window(), size, keep=keep)
    live: dict[int, int] = {}
    at = 0.0
    ended = 0

    def apply(decision: decide.RankDecision) -> None:
        nonlocal state, ended
        state, actions = decision
        for action in actions:
            if isinstance(action, StartRanks):
                for rank, incarnation in action.ranks:
                    assert rank not in live, "started while an incarnation of it lives"
                    live[rank] = incarnation
            if isinstance(action, decide.ReformRanks):
                assert all(live.get(rank) == incarnation for rank, incarnation in action.ranks)
            ended += isinstance(action, decide.End)

    apply(decide.begin(state))
    for picked, what in picks:
        at += 1.0
        those = sorted(picked & live.keys())
        if what == "die":
            spent = len(state.window.spent)
            apply(ranks_exited([(rank, live.pop(rank)) for rank in those], KILLED, at)(state))
            assert len(state.window.spent) <= spent + 1
            continue
        for rank in those:
            if state.ranks[rank].state is RankState.STARTING:
                apply(decide.rank_ready(state, rank, live[rank], at))
            elif state.ranks[rank].state is RankState.REFORMING:
                apply(decide.rank_ready(state, rank, live[rank], at, joined=state.epoch))
    for _ in range(200):
        stopping = [r for r in state.ranks if r.state is RankState.STOPPING]
        reforming = [r for r in state.ranks if r.state is RankState.REFORMING]
        starting = [r for r in state.ranks if r.state is RankState.STARTING]
        if stopping:
            number = stopping[0].number
            apply(rank_exited(number, live.pop(number), SHUTDOWN, at)(state))
        elif starting:
            apply(decide.rank_ready(state, starting[0].number, starting[0].incarnation, at))
        elif reforming:
            number = reforming[0].number
            apply(decide.rank_ready(state, number, live[number], at, joined=state.epoch))
        else:
            break

    assert state.phase in (Phase.SERVING, Phase.ENDED)
    assert ended == (state.phase is Phase.ENDED)
    assert len(state.window.spent) <= 4
    assert len(live) == (size if state.phase is Phase.SERVING else 0)
