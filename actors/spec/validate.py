"""What one argument has to be, for those who check what users give.

Guarantees: an error names the argument, its value and what to give instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeVar, cast

from phalanx.supervision import RuntimeFault, SpecError

_Word = TypeVar("_Word", bound=StrEnum)


def check_kind(field: str, value: object, kind: type) -> None:
    """Raise unless *value* is a *kind*."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise SpecError(field, value, f"give {article} {kind.__name__}")


def check_word(field: str, value: object, kind: type[_Word]) -> _Word:
    """Return the member of *kind* that *value* is, or names."""
    try:
        return kind(str(value))
    except ValueError:
        raise SpecError(field, value, f"give one of {', '.join(kind)}") from None


def check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise unless *value* is one of *choices*."""
    if value not in choices:
        raise SpecError(field, value, f"give one of {', '.join(choices)}")


def check_callable(field: str, value: object) -> None:
    """Raise unless *value* can be called."""
    if not callable(value):
        raise SpecError(field, value, "give something that can be called")


def check_rank(field: str, rank: object, size: int) -> None:
    """Raise unless *rank* is a rank of a group of *size*."""
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < size:
        raise SpecError(field, rank, f"give a rank from 0 to {size - 1}")


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


def check_limit(field: str, value: object) -> float | None:
    """Return *value* if it is a number of seconds above 0, or None for no limit."""
    return None if value is None else check_seconds(field, value, positive=True)


def check_per_rank(field: str, values: object, world_size: int) -> Sequence[Any]:
    """Return *values* if it is a list or tuple with one entry per rank."""
    if not isinstance(values, list | tuple):
        raise SpecError(field, values, "give a list or tuple with one entry per rank")
    given = cast("Sequence[Any]", values)
    if len(given) != world_size:
        raise SpecError(
            field, given, f"has {len(given)} entries for {world_size} ranks; give one for each"
        )
    return given


def check_env(field: str, env: object) -> Mapping[str, str]:
    """Return *env* if it is a mapping of text to text that an environment can hold."""
    if env is None:
        return {}
    if not isinstance(env, Mapping):
        raise SpecError(field, env, "give a mapping of names to text")
    named = cast("Mapping[object, object]", env)
    for key, value in named.items():
        if not isinstance(key, str) or not key or "=" in key or "\0" in key:
            raise SpecError(field, key, "a variable's name is text without '=' and NUL")
        if not isinstance(value, str) or "\0" in value:
            raise SpecError(f"{field}[{key!r}]", value, "a variable's value is text without NUL")
    return cast("Mapping[str, str]", named)


def too_few_descriptors(error: BaseException) -> RuntimeFault:
    """Return what *error*, a want of descriptors, is for a user."""
    fault = RuntimeFault(
        f"no descriptor was free ({error}); close files, or raise the hard limit (`ulimit -Hn`)"
    )
    fault.__cause__ = error
    return fault
