"""Frozen dataclasses out of JSON that another version, or somebody else, may have written.

Guarantees: what has a value in the JSON is of the type its field is declared with, or there is a
`ValueError` that names the field; what is missing has its default; what is not known is passed
over. So a file outlives the version that wrote it, and a foreign one is refused.

Left to others: what the values mean.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from phalanx.supervision import ExitKind

from .circumstances import Fate

if TYPE_CHECKING:
    from enum import Enum

_T = TypeVar("_T")
_Reader = Callable[[Any, str], Any]


def built(kind: type[_T], record: Mapping[str, Any], parts: Mapping[str, type[Any]]) -> _T:
    """Return the *kind* that *record* describes; *parts* are its own dataclasses, by name.

    Raises:
        ValueError: it describes none.
    """
    values: dict[str, Any] = {}
    for each in fields(cast("Any", kind)):
        if each.name in record:
            try:
                values[each.name] = _reader(str(each.type), parts)(record[each.name], each.name)
            except ValueError as error:
                raise ValueError(f"{error} in {kind.__name__}") from error
        elif each.default is MISSING and each.default_factory is MISSING:
            raise ValueError(f"{each.name} is missing in {kind.__name__}")
    return kind(**values)


def as_table(value: object, name: str) -> dict[str, Any]:
    """Return *value* if it is a JSON object."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} is no object")  # noqa: TRY004  # what was written is wrong
    return cast("dict[str, Any]", value)


def _reader(declared: str, parts: Mapping[str, type[Any]]) -> _Reader:
    """Return what reads a value of the type that is *declared* so."""
    inner, is_optional = declared.removesuffix(" | None"), declared.endswith(" | None")
    if is_optional:
        read = _reader(inner, parts)
        return lambda value, name: None if value is None else read(value, name)
    several = re.fullmatch(r"tuple\[(\w+), \.\.\.\]", inner)
    if several:
        return _each(_reader(several[1], parts))
    if inner in parts:
        kind = parts[inner]
        return lambda value, name: built(kind, as_table(value, name), parts)
    return _READERS[inner]


def _plain(*kinds: type) -> _Reader:
    def read(value: object, name: str) -> Any:
        if type(value) not in kinds:  # a bool is no number here
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise ValueError(f"{name} is a {type(value).__name__}, not {wanted},")
        return value

    return read


def _each(read: _Reader) -> _Reader:
    def read_all(value: object, name: str) -> Any:
        if not isinstance(value, list):
            raise ValueError(f"{name} is no list")  # noqa: TRY004  # as above
        return tuple(read(item, name) for item in cast("Sequence[Any]", value))

    return read_all


def _number(*kinds: type) -> _Reader:
    plain = _plain(*kinds)

    def read(value: object, name: str) -> Any:
        number = plain(value, name)
        if not -(2**63) <= number < 2**63:  # what we write fits; what does not cannot be shown
            raise ValueError(f"{name} is out of range")
        return number

    return read


def _choice(kind: type[Enum]) -> _Reader:
    text = _plain(str)
    return lambda value, name: kind(text(value, name))


def _numbers(value: object, name: str) -> Any:
    read = _number(int, float)
    return {key: read(each, name) for key, each in as_table(value, name).items()}


_READERS: Final[Mapping[str, _Reader]] = {
    "str": _plain(str),
    "bool": _plain(bool),
    "int": _number(int),
    "float": _number(float, int),
    "Mapping[str, float]": _numbers,
    "ExitKind": _choice(ExitKind),
    "Fate": _choice(Fate),
}
