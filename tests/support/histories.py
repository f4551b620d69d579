"""Tells the history of a group that does everything right, for tests to put a lie into."""

from __future__ import annotations

from typing import Any

from phalanx.chaos import Event, History
from phalanx.chaos.checker.checker import check
from phalanx.chaos.history.events import (
    CallBegan,
    CallEnded,
    CallIssued,
    CallSent,
    CallSettled,
    DriverEnded,
    DriverStarted,
    GroupBuilt,
    GroupDown,
    GroupEnded,
    GroupUp,
    RankDied,
    RankExited,
    RankReady,
    RankStarted,
    ReplyReceived,
    SteadyStateChecked,
    WorkerStarted,
)


class Teller:
    """Writes the history of a group that does everything right, in the order of the calls made."""

    def __init__(self, size: int = 2, **options: Any) -> None:
        self.events: list[Event] = []
        self.size = size
        self.now = 0.0
        self.calls = 0
        self.wires = 0
        self.epoch = 0
        self.incarnations = dict.fromkeys(range(size), 0)
        self.turns: dict[tuple[int, int], int] = {}
        self.descriptors = 0
        self.add(DriverStarted, number=1, pid=100)
        built = {"strategy": "one_for_all", "intensity": 3, "period": 60.0, **options}
        self.add(GroupBuilt, group="g", world_size=size, **built)

    def add(self, kind: type[Event], **fields: Any) -> Any:
        self.now += 0.01
        record = kind(**{"at": self.now, **fields})
        self.events.append(record)
        return record

    def who(self, rank: int) -> dict[str, Any]:
        incarnation = self.incarnations[rank]
        return {"group": "g", "rank": rank, "incarnation": incarnation, "epoch": self.epoch}

    def start(self, *ranks: int, meets: bool = True, new_epoch: bool = True) -> None:
        self.epoch += new_epoch
        for rank in ranks:
            self.incarnations[rank] += 1
            self.add(RankStarted, **self.who(rank), pid=self.pid(rank))
        for rank in ranks:
            place = f"127.0.0.1:{7000 + self.epoch}" if meets else ""
            self.add(WorkerStarted, **self.who(rank), pid=self.pid(rank), rendezvous=place)
        for rank in ranks:
            self.add(RankReady, **self.who(rank), pid=self.pid(rank))
        self.add(GroupUp, group="g", epoch=self.epoch, world_size=self.size)

    def pid(self, rank: int) -> int:
        return 1000 + 100 * rank + self.incarnations[rank]

    def die(
        self,
        rank: int,
        decision: str = "restart",
        stopped: tuple[int, ...] = (),
        reason: str = "killed",
    ) -> None:
        who = {**self.who(rank), "pid": self.pid(rank)}
        self.add(RankExited, **who, reason=reason)
        self.add(RankDied, **who, reason=reason, decision=decision)
        self.add(GroupDown, group="g", epoch=self.epoch, cause="a death")
        for other in stopped:
            self.add(RankExited, **self.who(other), pid=self.pid(other), reason="shutdown")

    def restart(self) -> None:
        """Have rank 0 of two die, and both start anew."""
        self.die(0, stopped=(1,))
        self.start(0, 1)

    def issue(self, shape: str = "collective", **more: Any) -> int:
        self.calls += 1
        what = {"method": "m", "shape": shape, **more}
        self.add(CallIssued, group="g", call=self.calls, **what)
        return self.calls

    def send(self, call: int, *ranks: int) -> int:
        self.wires += 1
        to = tuple((rank, self.incarnations[rank]) for rank in ranks or range(self.size))
        self.add(CallSent, group="g", call=call, wire=self.wires, epoch=self.epoch, ranks=to)
        return self.wires

    def begin(self, call: int, wire: int, rank: int, **other: Any) -> None:
        key = rank, self.incarnations[rank]
        self.turns[key] = self.turns.get(key, 0) + 1
        fields = {**self.who(rank), "call": call, "wire": wire, "turn": self.turns[key]}
        self.add(CallBegan, **{**fields, "descriptors": self.descriptors, **other})

    def end(
        self, call: int, wire: int, rank: int, error: str = "", *, joined: bool = False
    ) -> None:
        self.add(CallEnded, **self.who(rank), call=call, wire=wire, error=error, joined=joined)

    def run(self, call: int, wire: int, *ranks: int) -> None:
        """Begin and end *call* on *ranks*, or on all, one after the other."""
        for rank in ranks or range(self.size):
            self.begin(call, wire, rank)
            self.end(call, wire, rank)

    def begin_new(self, **more: Any) -> int:
        """Issue a call, send it, and begin it on rank 0."""
        call = self.issue(**more)
        self.begin(call, self.send(call), 0)
        return call

    def take(self, call: int, wire: int, rank: int, **other: Any) -> None:
        said = {"by_call": call, "by_rank": rank, "by_wire": wire}
        said["by_incarnation"] = self.incarnations[rank]
        self.add(ReplyReceived, group="g", call=call, rank=rank, **{**said, **other})

    def settle(self, call: int, outcome: str = "value", **more: Any) -> None:
        if outcome == "died":
            died = [each for each in self.events if isinstance(each, RankDied)]
            more = {"deaths": tuple((each.rank, each.incarnation) for each in died[-1:]), **more}
        self.add(CallSettled, group="g", call=call, outcome=outcome, **more)

    def serve(self, **more: Any) -> int:
        call = self.issue(**more)
        wire = self.send(call)
        self.run(call, wire)
        self.settle(call)
        for rank in range(self.size):
            self.take(call, wire, rank)
        return call

    def close(self) -> None:
        self.add(SteadyStateChecked, group="g", ok=True)
        for rank in self.incarnations:
            self.add(RankExited, **self.who(rank), pid=self.pid(rank), reason="shutdown")
        self.add(GroupEnded, group="g", epoch=self.epoch, cause="")
        self.add(DriverEnded, number=1, closed=True)

    def history(self) -> History:
        return History.of(self.events, seed=7)

    def broken(self) -> set[str]:
        return {violation.invariant for violation in check(self.history())}


def whole(size: int = 2, **options: Any) -> Teller:
    teller = Teller(size, **options)
    teller.start(*range(size))
    teller.serve()
    return teller
