"""An exception on its way from a worker to a caller.

Guarantees: it always travels; what cannot be pickled, or be rebuilt where it arrives, is told of by
its name, its text and its traceback; what claims to be one and is not is told of as that.
"""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.supervision import RemoteError

from .codec import encode_by_value

if TYPE_CHECKING:
    from .frames import Frame


@dataclass(frozen=True, slots=True)
class RemoteFailure:
    """An exception on its way to the caller.

    Attributes:
        pickled: The exception itself, or None where it cannot be pickled.
        trace: The formatted traceback, causes included.
        directive: What was decided about the worker for it; empty for nothing.
    """

    type_name: str
    message: str
    trace: str
    pickled: bytes | None
    directive: str = ""

    @classmethod
    def of(cls, error: BaseException) -> RemoteFailure:
        """Return *error* in a form that always travels."""
        kind = type(error)
        name = kind.__qualname__
        if kind.__module__ not in ("builtins", "__main__"):
            name = f"{kind.__module__}.{name}"
        try:
            message = str(error)
        except Exception as broken:  # noqa: BLE001  # a __str__ of the user's may do anything
            message = f"<no text: its __str__ raised {type(broken).__name__}>"
        try:
            trace = "".join(traceback.format_exception(error))
        except Exception:  # noqa: BLE001  # the same
            trace = ""
        try:
            pickled: bytes | None = encode_by_value(error, "the exception")
        except Exception:  # noqa: BLE001  # the stand-in says what is known
            pickled = None
        return cls(name, message, trace, pickled)

    @classmethod
    def read(cls, frame: Frame) -> RemoteFailure:
        """Return what *frame* carries; where it cannot be read or is none, why that is so."""
        try:
            failure = frame.value()
        except Exception as error:  # noqa: BLE001  # no message of a worker's ends the driver
            return cls.of(error)
        if isinstance(failure, cls):
            return failure
        return cls.of(TypeError(f"a worker told of its error by {type(failure).__name__}"))

    @property
    def headline(self) -> str:
        """Its type and its text, as the last line of a traceback has them."""
        return f"{self.type_name}: {self.message}" if self.message else self.type_name

    def revive(self) -> BaseException:
        """Return the original exception, or a `RemoteError` that stands in for it."""
        if self.pickled is not None:
            try:
                error = pickle.loads(self.pickled)
            except (Exception, SystemExit):  # noqa: BLE001  # a type that cannot be rebuilt
                error = None
            # What is no Exception (SystemExit, CancelledError, ...) means something to whoever
            # catches it, and not this: a stand-in tells of it.
            if isinstance(error, Exception):
                return error
        return RemoteError(self.type_name, self.message, self.trace)
