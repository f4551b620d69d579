"""Worker identity: the labels on every line and log record of a worker."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLabels:
    """One incarnation of one worker.

    Attributes:
        child: Its path in the supervision tree.
        rank: None for a process without one (a standby, a rendezvous store).
        incarnation: How often this child has been started, 1 for the first.
        epoch: How often its group has been formed.
        coordinates: Its place in the parallel layout, such as ``dp=0,tp=1``; empty for none.
        pid: 0 until it is known.
        device: The device leased to it; empty for none.
    """

    child: str
    group: str
    rank: int | None = None
    incarnation: int = 1
    epoch: int = 0
    coordinates: str = ""
    pid: int = 0
    device: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the labels as JSON can hold them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, labels: dict[str, Any]) -> WorkerLabels:
        """Return what `as_dict` was called on."""
        return cls(**labels)

    def prefix(self) -> str:
        """Return the prefix of its lines on a terminal."""
        who = self.group if self.rank is None else f"{self.group}/{self.rank}"
        where = f" {self.coordinates}" if self.coordinates else ""
        pid = f" {self.pid}" if self.pid else ""
        return f"[{who}{where} #{self.incarnation}{pid}]"
