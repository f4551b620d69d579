"""What an executor is to be: checked when it is built, before anything starts.

Guarantees: a spec that exists makes sense: its sizes agree, its class is a worker class, its
arguments have been pickled.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from phalanx.runtime import encode_by_value
from phalanx.supervision import BackOff, Intensity, Restart, SpecError, Strategy

from .layout import Layout
from .worker import WorkerActor

if TYPE_CHECKING:
    from pathlib import Path

Launch = Literal["zygote", "exec", "inline"]
Console = Literal["text", "json"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StopPolicy:
    """How a rank is stopped: ask, wait, SIGTERM, wait, SIGKILL of its whole process tree.

    Attributes:
        ask: Seconds to finish the calls it has been sent and run `on_stop`.
        terminate: Seconds from SIGTERM to SIGKILL.
        hurry: Seconds from SIGTERM to SIGKILL for a survivor of a broken group, which may be
            stuck in a collective operation with a rank that is gone. 0 kills at once.
    """

    ask: float = 5.0
    terminate: float = 2.0
    hurry: float = 0.25

    def __post_init__(self) -> None:
        for name in ("ask", "terminate", "hurry"):
            check_seconds(f"stop.{name}", getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorSpec:
    """What an executor is to be. See `Executor` for the meaning of the fields."""

    worker: type[WorkerActor]
    name: str
    world_size: int
    layout: Layout
    is_plain: bool
    factory: bytes
    keywords: tuple[bytes, ...]
    env: Mapping[str, str]
    rank_env: Sequence[Mapping[str, str]]
    strategy: Strategy
    intensity: Intensity
    restart: Restart
    backoff: BackOff | None
    devices: Any
    preload: tuple[str, ...]
    launch: Launch
    start_timeout: float
    stop: StopPolicy
    queue_depth: int
    async_output: bool
    report_dir: Path | None


def factory_of(
    worker: type[WorkerActor], args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> bytes:
    """Return the pickled recipe for one worker object.

    Raises:
        NotPicklable: naming the class or the argument that cannot travel.
        BadArguments: the constructor cannot be called so.
    """
    encode_by_value(worker, f"worker={worker!r}")
    for index, value in enumerate(args):
        encode_by_value(value, f"args[{index}]={value!r}")
    for key, value in (kwargs or {}).items():
        encode_by_value(value, f"kwargs[{key!r}]={value!r}")
    return encode_by_value((worker, tuple(args), dict(kwargs or {})), "the constructor's arguments")


def check_worker(worker: object) -> type[WorkerActor]:
    """Return *worker* if it is a worker class."""
    if not (isinstance(worker, type) and issubclass(worker, WorkerActor)):
        raise SpecError("worker", worker, "give a class derived from phalanx.WorkerActor")
    if worker is WorkerActor or inspect.isabstract(worker):
        raise SpecError("worker", worker, "give a concrete class with methods of its own")
    return worker


def check_count(field: str, value: object, least: int = 1) -> int:
    """Return *value* if it is an integer of at least *least*."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SpecError(field, value, f"give an integer >= {least}")
    return value


def check_seconds(field: str, value: object, *, positive: bool = False) -> float:
    """Return *value* if it is a finite number of seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise SpecError(field, value, "give a number of seconds")
    if value < 0 or (positive and value == 0):
        raise SpecError(field, value, f"give seconds {'>' if positive else '>='} 0")
    return float(value)


def check_per_rank(field: str, values: object, world_size: int) -> Sequence[Any]:
    """Return *values* if it is a list or tuple with one entry per rank."""
    if not isinstance(values, list | tuple):
        raise SpecError(field, values, "give a list or tuple with one entry per rank")
    if len(values) != world_size:
        raise SpecError(
            field, values, f"has {len(values)} entries for {world_size} ranks; give one for each"
        )
    return values


def check_env(field: str, env: object) -> Mapping[str, str]:
    """Return *env* if it is a mapping of text to text that an environment can hold."""
    if env is None:
        return {}
    if not isinstance(env, Mapping):
        raise SpecError(field, env, "give a mapping of names to text")
    for key, value in env.items():
        if not isinstance(key, str) or not key or "=" in key or "\0" in key:
            raise SpecError(field, key, "a variable's name is text without '=' and NUL")
        if not isinstance(value, str) or "\0" in value:
            raise SpecError(f"{field}[{key!r}]", value, "a variable's value is text without NUL")
    return env
