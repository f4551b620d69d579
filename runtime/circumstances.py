"""What a crash report consists of: a call, what became of calls, what the kernel says.

Guarantees: plain values that survive JSON; the text of each is what a person is shown.
"""

from __future__ import annotations

import signal as signals
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from .stacks import STACKS

if TYPE_CHECKING:
    from collections.abc import Mapping


class Fate(StrEnum):
    """What became of a call.

    ``failed``: its caller has `WorkerDied`. ``sent_again``: it runs again once the group is whole.
    ``kept``: a gather, which keeps the answers of the other ranks.
    """

    FAILED = "failed"
    SENT_AGAIN = "sent_again"
    KEPT = "kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallInProgress:
    """What a worker was doing when it died.

    Attributes:
        running_for: Seconds since the call was begun, or None where that is not known.
        abandoned: Whether it had been settled without this rank: it had timed out, or was cancelled
            or interrupted, or another rank had raised.
    """

    method: str
    call_id: int
    running_for: float | None = None
    abandoned: bool = False

    def __str__(self) -> str:
        about = [f"call {self.call_id}"]
        if self.running_for is not None:
            about.append(f"running for {self.running_for:.3f} s")
        if self.abandoned:
            about.append("abandoned by its caller")
        return f"{self.method} ({', '.join(about)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFate:
    """What became of a call that a death touched.

    Attributes:
        begun: Whether a rank had begun it; one that none had is sent again at no cost.
        retries_left: How often another death may send it again.
    """

    method: str
    call_id: int
    fate: Fate
    begun: bool = True
    retries_left: int = 0

    def __str__(self) -> str:
        about = [f"call {self.call_id}"]
        if not self.begun:
            about.append("no rank had begun it")
        elif self.fate is Fate.SENT_AGAIN:
            left = self.retries_left
            about.append(f"{left or 'no'} {'retry' if left == 1 else 'retries'} left")
        return f"{self.method} ({', '.join(about)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitEvidence:
    """What the kernel says about how a process ended.

    Attributes:
        code: Its exit code, or None where a signal ended it or nobody knows.
        signal: The signal that ended it, or None.
        core_dumped: Whether the kernel wrote a core file.
        oom: What speaks for an out-of-memory kill; empty for nothing.
        rusage: What it used, by the names of ``struct rusage``; empty where not known.
    """

    code: int | None = None
    signal: int | None = None
    core_dumped: bool = False
    oom: str = ""
    rusage: Mapping[str, float] = field(default_factory=dict[str, float])

    def __str__(self) -> str:
        parts: list[str] = []
        if self.code is not None:
            parts.append(f"exit code {self.code}")
        if self.signal is not None:
            known = {int(each): each.name for each in signals.Signals}
            known[STACKS] = f"signal {STACKS}, ours: it writes its stacks and ends"
            parts.append(known.get(self.signal, f"signal {self.signal}"))
        if self.core_dumped:
            parts.append("core dumped")
        if self.oom:
            parts.append(f"out of memory: {self.oom}")
        if "ru_maxrss" in self.rusage:  # in KiB, on Linux
            parts.append(f"at most {self.rusage['ru_maxrss'] / 1024:.1f} MiB resident")
        if "ru_utime" in self.rusage:
            seconds = self.rusage["ru_utime"] + self.rusage.get("ru_stime", 0.0)
            parts.append(f"{seconds:.2f} s of processor time")
        return "; ".join(parts)


def said_of_calls(calls: tuple[CallFate, ...], waiting: int, shown: int = 8) -> str:
    """Return what became of *calls*, and that *waiting* more had not been sent, for people."""
    titles = {
        Fate.FAILED: "failed",
        Fate.SENT_AGAIN: "sent again",
        Fate.KEPT: "answers of the other ranks kept",
    }
    parts: list[str] = []
    for fate, title in titles.items():
        those = [call for call in calls if call.fate is fate]
        if those:
            more = f" and {len(those) - shown} more" if len(those) > shown else ""
            parts.append(f"{title}: {', '.join(map(str, those[:shown]))}{more}")
    if waiting:
        parts.append(f"not sent yet, and waiting: {waiting}")
    return "; ".join(parts)
