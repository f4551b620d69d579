"""Checks of arguments given for each rank; the general ones are in `supervision`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from phalanx.supervision import RuntimeFault, SpecError


def check_rank(field: str, rank: object, size: int) -> None:
    """Raise unless *rank* is a rank of a group of *size*."""
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < size:
        raise SpecError(field, rank, f"give a rank from 0 to {size - 1}")


def check_per_rank(field: str, values: object, world_size: int | None) -> Sequence[Any]:
    """Return *values* if it is a list or tuple with one entry per rank; None: of any length."""
    if not isinstance(values, list | tuple):
        raise SpecError(field, values, "give a list or tuple with one entry per rank")
    given = cast("Sequence[Any]", values)
    if world_size is not None and len(given) != world_size:
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
