"""Remote exception: encodes an exception in a worker and rebuilds it for the caller.

Guarantees: it always travels, with its type if it can be pickled and its class is known to the
reader; an ``__init__`` whose parameters are not `args` is not called again. Otherwise its name,
text and traceback travel.
"""

from __future__ import annotations

import contextlib
import pickle
import traceback
import weakref
from dataclasses import dataclass, replace
from functools import partial
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any

import cloudpickle

from phalanx.supervision import RemoteError

from .codec import encode_by_value

if TYPE_CHECKING:
    from .packet_decoder import Frame

_CUT = 8000  # characters


@dataclass(frozen=True, slots=True)
class RemoteFailure:
    """An exception on its way to the caller.

    Attributes:
        pickled: The exception itself; None if it cannot be pickled.
        bare: The same without the class's own ``__reduce__``, in case that fails; None if equal.
        trace: The formatted traceback, causes included.
        directive: The decider's directive for the worker; empty for none.
    """

    type_name: str
    message: str
    trace: str
    pickled: bytes | None
    directive: str = ""
    bare: bytes | None = None

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
        pickled, bare = _pickled(error, bare=False), _pickled(error, bare=True)
        return cls(name, message, trace, pickled, bare=None if bare == pickled else bare)

    @classmethod
    def read(cls, frame: Frame) -> RemoteFailure:
        """Return the failure in *frame*, or the error of decoding it."""
        try:
            failure = frame.value()
        except Exception as error:  # noqa: BLE001  # no message of a worker's ends the driver
            return cls.of(error)
        if isinstance(failure, cls):
            return failure
        return cls.of(TypeError(f"a worker told of its error by {type(failure).__name__}"))

    def shortened(self) -> RemoteFailure:
        """Return one for which there is always room: its texts are cut, the exception left out."""
        message, trace = self.message[:_CUT], self.trace[:_CUT]
        return replace(self, message=message, trace=trace, pickled=None, bare=None)

    @property
    def headline(self) -> str:
        """Its type and text, as in the last line of a traceback."""
        return f"{self.type_name}: {self.message}" if self.message else self.type_name

    def revive(self) -> BaseException:
        """Return the original exception, or a `RemoteError` that stands in for it."""
        for pickled in (self.pickled, self.bare):
            if pickled is None:
                continue
            try:
                error = pickle.loads(pickled)
            except (Exception, SystemExit):  # noqa: BLE001, S112  # it cannot be rebuilt so
                continue
            # A BaseException (SystemExit, CancelledError, ...) must not act on the caller.
            if isinstance(error, Exception):
                return error
        return RemoteError(self.type_name, self.message, self.trace)


def _pickled(error: BaseException, *, bare: bool) -> bytes | None:
    try:
        return encode_by_value(error, "the exception", partial(_pickler, bare))
    except Exception:  # noqa: BLE001  # the stand-in says what is known
        return None


def _pickler(bare: bool, *args: Any, **options: Any) -> Any:
    """Return a pickler whose exceptions are rebuilt without their ``__init__``.

    Pickle calls the class with `args`, which ``super().__init__`` was given, and which the class's
    own ``__init__`` need not take. A ``__reduce__`` of the class is respected, unless *bare*.
    """
    make: Any = cloudpickle.Pickler  # it has no types
    pickler = make(*args, **options)
    itself = weakref.proxy(pickler)  # a cycle would keep what it has pickled, tracebacks included

    def reduce(obj: Any) -> Any:
        if isinstance(obj, BaseException) and type(obj).__flags__ & _HEAP:
            kind = type(obj)
            usual = all(
                getattr(kind, name) is getattr(BaseException, name)
                for name in ("__reduce__", "__reduce_ex__", "__setstate__")
            )
            if bare or usual:
                return _rebuild, (kind, obj.args), _state_of(obj), None, None, _set_state
        return make.reducer_override(itself, obj)

    pickler.reducer_override = reduce
    return pickler


def _rebuild(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    native = next(base for base in kind.__mro__ if not base.__flags__ & _HEAP)
    error: BaseException = native.__new__(kind, *args)
    object.__setattr__(error, "args", args)  # its own may refuse
    return error


def _state_of(error: BaseException) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return its attributes, and those in slots: of Python's own classes as well."""
    slots: dict[str, Any] = {}
    for base in type(error).__mro__:
        for name, member in vars(base).items():
            if not isinstance(member, MemberDescriptorType) or name in _LEFT_OUT:
                continue
            value = getattr(error, name, None)
            if value is not None:  # which Python's own take for one that is set
                slots[name] = value
    return vars(error), slots


def _set_state(error: BaseException, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    vars(error).update(state[0])
    for name, value in state[1].items():
        with contextlib.suppress(AttributeError):  # read-only: made by ``__new__``
            object.__setattr__(error, name, value)


_LEFT_OUT = {"obj", "__suppress_context__"}  # AttributeError's `obj` may be anything at all
_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made at run time
