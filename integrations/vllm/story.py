"""How it came to the end of an engine, told in the error that its clients get.

Guarantees: the exception of a call names the last death, with its crash report; where the engine
core is a process of its own, vLLM's `EngineDeadError` in the process of its client says the same.

The engine core can tell its client only that it is dead. So the client, which imports this before
it starts the core, names a file in the environment that the core inherits; it is written at the end
of an engine, and read and removed by the client. Of two engines that it has at the same time, both
tell what the last one told.
"""

from __future__ import annotations

import atexit
import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.engine.exceptions import EngineDeadError

if TYPE_CHECKING:
    from phalanx.runtime import CrashReport
    from phalanx.supervision import ExitReason

_VARIABLE = "PHALANX_VLLM_STORY"


class EngineEnded(RuntimeError):  # named for what happened
    """The workers of an engine have ended for good."""

    @classmethod
    def of(cls, reason: ExitReason | None, report: CrashReport | None) -> EngineEnded:
        """Return the error for the end by *reason*, after the death that *report* tells of."""
        end = "it was shut down" if reason is None else str(reason)
        told = "" if report is None else f"; the last death:\n{report.render()}"
        return cls(f"the workers of this engine have ended for good: {end}{told}")


def tell_story(text: str) -> None:
    """Leave *text* for the client of this engine."""
    where = os.environ.get(_VARIABLE)
    if where is None:
        return
    with suppress(OSError):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with os.fdopen(os.open(where, flags, 0o600), "w") as file:
            file.write(text)


def forget_story() -> None:
    """Begin an engine, to which what was told of an earlier one does not apply."""
    where = os.environ.get(_VARIABLE)
    if where is not None:
        with suppress(OSError):
            Path(where).unlink()


def await_story() -> None:
    """Name the file, and have vLLM's error tell what stands in it; once in each process."""
    if _VARIABLE in os.environ:
        return
    where = Path(tempfile.gettempdir()) / f"phalanx-{os.getpid()}-{secrets.token_hex(8)}.story"
    os.environ[_VARIABLE] = str(where)
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            where.unlink(missing_ok=True)

    atexit.register(remove)
    init = EngineDeadError.__init__

    def tell(self: EngineDeadError, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        with suppress(OSError):
            self.args = (f"{self.args[0]} {where.read_text()}", *self.args[1:])

    EngineDeadError.__init__ = tell  # there is no other way in


await_story()
