"""Options of executors in tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, cast

from phalanx.actors import Executor

Make = Callable[..., Executor[Any]]
"""The fixture `make`."""


def with_defaults(given: Mapping[str, Any], **usual: Any) -> dict[str, Any]:
    """Return the options *given*, with *usual* ones behind them, also within a group.

    A group among the *usual* ones is a mapping of its fields.
    """
    both = {**usual, **given}
    for name in usual.keys() & given.keys():
        behind: Any = usual[name]
        over: Any = given[name]
        if not isinstance(behind, Mapping):
            continue
        if isinstance(over, str):
            over = {"method": over}
        if not isinstance(over, Mapping):
            if not is_dataclass(over):
                continue
            plain: Any = cast("Any", type(over))()
            over = {
                each.name: value
                for each in fields(over)
                if (value := getattr(over, each.name)) != getattr(plain, each.name)
            }
        both[name] = {**cast("Mapping[str, Any]", behind), **cast("Mapping[str, Any]", over)}
    return both
