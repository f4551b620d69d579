"""Exceptions of all shapes on their way: their type, text and attributes arrive."""

from __future__ import annotations

from typing import Any, Self

import pytest

from phalanx.runtime import RemoteFailure


class KeywordOnly(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__("keyword")
        self.code = code


class Slots(Exception):
    __slots__ = ("code",)

    def __init__(self, code: int, _more: str) -> None:
        super().__init__("slots")
        self.code = code


class OwnNew(Exception):
    code: int

    def __new__(cls, code: int, *, key: str) -> Self:
        self = super().__new__(cls, key)
        self.code = code
        return self

    def __init__(self, code: int, *, key: str) -> None:
        super().__init__(f"{code} {key}")


class Frozen(Exception):
    code = 7

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


class FailingReduce(KeywordOnly):
    def __reduce__(self) -> Any:
        raise RuntimeError


class WrongReduce(KeywordOnly):
    def __reduce__(self) -> Any:
        return WrongReduce, (self.code,)


class OwnReduce(Exception):
    """Holds what cannot be pickled, and knows how to do without."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code
        self.lambda_ = (each for each in "no")

    def __reduce__(self) -> Any:
        return OwnReduce, (self.code,)


class System(OSError):
    def __init__(self, code: int, _more: str) -> None:
        super().__init__(2, "nothing there", "file")
        self.code = code


class Encoding(UnicodeDecodeError):
    def __init__(self, code: int) -> None:
        super().__init__("utf-8", b"x", 0, 1, "why")
        self.code = code


class Numbered(Exception):
    """Can be called with its `args`, and says something else then."""

    def __init__(self, code: int | str) -> None:
        super().__init__(f"code {code}")
        self.code = code


class Group(ExceptionGroup[Exception]):
    code = 7


class OfTheProgram(KeywordOnly):
    __module__ = "__main__"


def recursive() -> Numbered:
    error = Numbered(7)
    error.itself = error  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    "error",
    [
        KeywordOnly(code=7),
        Slots(7, "more"),
        OwnNew(7, key="key"),
        Frozen("frozen"),
        FailingReduce(code=7),
        WrongReduce(code=7),
        OwnReduce(7),
        System(7, "more"),
        Encoding(7),
        Numbered(7),
        recursive(),
        Group("group", [System(7, "more"), ValueError()]),
        OfTheProgram(code=7),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_arrives_as_it_was_raised(error: Any) -> None:
    revived: Any = RemoteFailure.of(error).revive()

    assert type(revived) is type(error)
    assert str(revived) == str(error)
    assert revived.code == 7
    assert repr(revived.args) == repr(error.args)
