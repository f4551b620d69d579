"""Events of the helper processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class ZygoteReplaced:
    """The process that forks workers died and another has taken its place.

    Attributes:
        replaced: The process that died.
    """

    event: ClassVar[str] = "phalanx.zygote_replaced"
    level: ClassVar[str] = "warning"
    pid: int
    replaced: int
    reason: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardianReplaced:
    """The process that guards against orphans died and another has taken its place.

    Attributes:
        replaced: The process that died.
    """

    event: ClassVar[str] = "phalanx.guardian_replaced"
    level: ClassVar[str] = "warning"
    pid: int
    replaced: int
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
