"""The base of all events: a frozen dataclass with a dotted name and a level."""

from __future__ import annotations

import dataclasses
import json
from enum import Enum
from typing import Any, ClassVar, Protocol, cast, dataclass_transform

from phalanx.supervision import ExitReason


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """Base class of events; a subclass is a frozen dataclass of keywords.

    Subclasses name themselves: ``class GroupDown(Event, event="group_down", level="warning")``.

    Attributes:
        at: When it happened, in seconds on the monotonic clock.
    """

    event: ClassVar[str]
    at: float

    def __init_subclass__(cls, event: str = "", level: str = "info") -> None:
        cls.event = f"phalanx.{event}"
        if "level" not in cls.__annotations__:  # else it is a field of the value
            setattr(cls, "level", level)  # noqa: B010  # no class attribute for type checkers
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)


class LoggedEvent(Protocol):
    """Anything that can be emitted: a dataclass with a dotted name.

    Its ``level`` is an attribute of the class or of the value; ``info`` without one.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    event: ClassVar[str]


def discard_event(event: LoggedEvent) -> None:
    """Do nothing with *event*: for parts that are used without a stream."""


def fields(event: LoggedEvent) -> dict[str, Any]:
    """Return *event* as a record that JSON can hold, its name and level included."""
    record: dict[str, Any] = {"event": event.event, "level": getattr(event, "level", "info")}
    for field in dataclasses.fields(event):
        record[field.name] = _plain(getattr(event, field.name))
    return record


def _plain(value: object) -> Any:
    match value:
        case Enum():
            return value.value
        case None | bool() | int() | float() | str():
            return value
        case ExitReason():
            return str(value)
        case dict():
            items = cast("dict[object, object]", value).items()
            return {str(key): _plain(item) for key, item in items}
        case list() | tuple() | set() | frozenset():
            return [_plain(item) for item in cast("list[object]", value)]
        case _ if callable(getattr(value, "brief", None)):  # a `CrashReport`
            return json.loads(cast("Any", value).brief().to_json())
        case _ if dataclasses.is_dataclass(value):
            names = (field.name for field in dataclasses.fields(value))
            return {name: _plain(getattr(value, name)) for name in names}
        case _:
            return repr(value)
