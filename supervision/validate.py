"""Checks of arguments: a `SpecError` names the argument, its value and the remedy."""

from __future__ import annotations

import math
import sys
from enum import StrEnum
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

from .errors import MissingPackage, SpecError

if TYPE_CHECKING:
    from types import UnionType

_Word = TypeVar("_Word", bound=StrEnum)
_MOST = sys.float_info.max  # `math.isfinite` raises for a greater integer


def is_installed(package: str) -> bool:
    """Whether *package* can be imported; it is not imported."""
    try:
        return find_spec(package) is not None
    except ValueError:  # None stands for it in sys.modules, so that its import fails
        return False


def installed_version(package: str) -> str:
    """Return the version of the distribution *package*; empty if it is not installed."""
    try:
        # Not before it is asked for: with all that it imports it would be a tenth of each start.
        return str(import_module("importlib.metadata").version(package))
    except ModuleNotFoundError:  # which its `PackageNotFoundError` is
        return ""


def require_package(package: str, extra: str) -> None:
    """Raise `MissingPackage` unless *package*, which *extra* brings, is installed."""
    if not is_installed(package):
        raise MissingPackage(package, extra)


def check_kind(field: str, value: object, kind: type | UnionType) -> None:
    """Raise unless *value* is a *kind*; truth is no number."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        name = kind.__name__ if isinstance(kind, type) else str(kind)
        raise SpecError(field, value, f"give {'an' if name[0] in 'AEIOU' else 'a'} {name}")


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


def check_count(field: str, value: object, least: int = 1) -> int:
    """Return *value* if it is an integer of at least *least*."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SpecError(field, value, f"give an integer >= {least}")
    return value


def check_number(field: str, value: object, least: float = 0.0, most: float = math.inf) -> float:
    """Return *value* if it is a finite number from *least* to *most*."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MOST:
        raise SpecError(field, value, "give a finite number")
    if not least <= value <= most:
        upper = "" if most == math.inf else f" and <= {most:g}"
        raise SpecError(field, value, f"give a number >= {least:g}{upper}")
    return float(value)


def check_seconds(
    field: str, value: object, *, positive: bool = False, finite: bool = True
) -> float:
    """Return *value* if it is a number of seconds, 0 or more; above 0 if *positive*."""
    seconds = math.inf if value == math.inf and not finite else check_number(field, value)
    if positive and not seconds:
        raise SpecError(field, value, "give seconds > 0")
    return seconds


def check_limit(field: str, value: object) -> float | None:
    """Return *value* if it is a number of seconds above 0, or None for no limit."""
    return None if value is None else check_seconds(field, value, positive=True)
