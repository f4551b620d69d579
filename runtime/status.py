"""From a process's wait status to an exit reason.

Guarantees: every way a process can end has exactly one reason, also where somebody else collected
the status (``unknown``, never a guess).
"""

from __future__ import annotations

import signal as signals

from phalanx.supervision import ExitKind, ExitReason


def exit_of_process(
    code: int | None,
    signal: int | None,
    *,
    asked: bool,
    unresponsive: bool = False,
    detail: str = "",
) -> ExitReason:
    """Return the reason for a process that ended with exit *code* or by *signal*.

    Args:
        code: The exit code, or None where a signal ended it or the status is unknown.
        signal: The signal number, or None where it exited or the status is unknown.
        asked: Whether a stop had been asked for before it ended.
        unresponsive: Whether we killed it because it hung.
        detail: What the worker said of its own end, such as its last exception.

    Both *code* and *signal* None means that somebody else collected the status.
    """
    if unresponsive:
        return ExitReason(ExitKind.UNRESPONSIVE, detail or "hung", code, signal)
    if asked:
        return ExitReason(ExitKind.SHUTDOWN, detail, code, signal)
    if signal is not None:
        name = signals.Signals(signal).name if signal in _KNOWN else f"signal {signal}"
        kind = ExitKind.KILLED if signal == signals.SIGKILL else ExitKind.CRASH
        return ExitReason(kind, f"{name}; {detail}" if detail else name, code, signal)
    if code is None:
        text = detail or "its exit status was collected by somebody else"
        return ExitReason(ExitKind.UNKNOWN, text)
    if code == 0:
        return ExitReason(ExitKind.NORMAL, detail, code)
    text = f"exit code {code}"
    return ExitReason(ExitKind.CRASH, f"{text}; {detail}" if detail else text, code)


_KNOWN = frozenset(int(member) for member in signals.Signals)
