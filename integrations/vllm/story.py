"""The cause of an engine's end, in the errors that its clients get.

Guarantees: the exception of a call names the last death, with its crash report; if the engine core
is a process of its own, vLLM's `EngineDeadError` in the process of its client does too.

vLLM has no way for an engine core to send a cause to its client. So the client, which imports this
before it starts the core, names a file in the environment that the core inherits; it is written at
the end of an engine, and read and removed by the client. Two engines of one client at the same time
share it.
"""

from __future__ import annotations

import atexit
import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .compat import EngineDeadError

if TYPE_CHECKING:
    from phalanx.actors import Status
    from phalanx.runtime import CrashReport
    from phalanx.supervision import ExitReason

_VARIABLE = "PHALANX_VLLM_STORY"


class EngineEnded(RuntimeError):
    """The workers of an engine have ended for good."""

    @classmethod
    def of(cls, reason: ExitReason | str | None, report: CrashReport | None) -> EngineEnded:
        """Return the error for the end by *reason* after the death in *report*."""
        end = "it was shut down" if reason is None else str(reason)
        told = "" if report is None else f"; the last death:\n{report.render()}"
        return cls(f"the workers of this engine have ended for good: {end}{told}")


class EngineRecovering(RuntimeError):
    """The workers of an engine are being restarted; its requests wait."""

    @classmethod
    def of(cls, status: Status) -> EngineRecovering:
        """Return the error for a group of this *status*."""
        return cls(f"the workers of this engine are being restarted; restarts: {status.restarts}")


def tell_story(text: str) -> None:
    """Leave *text* for the client of this engine."""
    where = os.environ.get(_VARIABLE)
    if where is None:
        return
    with suppress(OSError):
        # In one step: this process may be about to end, and the client about to read.
        with tempfile.NamedTemporaryFile("w", dir=Path(where).parent, delete=False) as file:
            file.write(text)
        Path(file.name).replace(where)


def forget_story() -> None:
    """Remove the cause of an earlier engine's end."""
    where = os.environ.get(_VARIABLE)
    if where is not None:
        with suppress(OSError):
            Path(where).unlink()


def await_story() -> None:
    """Name the file, unless a process above has, and add its text to vLLM's error."""
    named = os.environ.get(_VARIABLE)
    file = f"phalanx-{os.getpid()}-{secrets.token_hex(8)}.story"
    where = Path(named or Path(tempfile.gettempdir()) / file)
    if named is None:
        os.environ[_VARIABLE] = str(where)
        atexit.register(_remove, where, os.getpid())
    init = EngineDeadError.__init__

    def tell(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        with suppress(OSError):
            self.args = (f"{self.args[0]} {where.read_text()}", *self.args[1:])

    EngineDeadError.__init__ = tell  # vLLM has no other way in


def _remove(where: Path, owner: int) -> None:
    if os.getpid() == owner:
        where.unlink(missing_ok=True)


await_story()
