"""Events of the helper processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperReplaced:
    """A helper process ended and another has taken its place.

    Attributes:
        helper: ``guardian``, ``zygote`` or ``output collector``.
        replaced: The process that ended.
    """

    event: ClassVar[str] = "phalanx.helper_replaced"
    level: ClassVar[str] = "warning"
    helper: str
    pid: int
    replaced: int
    reason: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperUnavailable:
    """A helper process cannot be started.

    Attributes:
        wait: Seconds until the next attempt.
    """

    event: ClassVar[str] = "phalanx.helper_unavailable"
    level: ClassVar[str] = "error"
    helper: str
    problem: str
    wait: float
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkUnsafe:
    """The zygote must not be forked: workers are started as fresh interpreters, which is slow.

    Attributes:
        problem: What the preload left behind: threads, or a CUDA context.
    """

    event: ClassVar[str] = "phalanx.fork_unsafe"
    level: ClassVar[str] = "warning"
    problem: str
    at: float
