"""The state of an engine's workers, for the process of its client: errors, health and metrics.

Guarantees: if the engine core is a separate process, vLLM's `EngineDeadError` in the process of its
client holds the crash report of the last death, as the core's own exception does. The server's
``/metrics`` counts recoveries.

vLLM has no way for an engine core to send any of it to its client. So the client, which imports the
executor before it starts the core, names a folder in the environment that the core inherits; each
core keeps a file there, which is replaced in one step. The client reads them, and removes the
folder; one that was killed has it removed by the next client of its user. vLLM's processes make
their ipc sockets there too, as those that are killed would leave them behind.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import shutil
import tempfile
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

_VARIABLE = "PHALANX_VLLM_STATE"
_SOCKETS = "VLLM_RPC_BASE_PATH"  # vLLM's own
_SECONDS = "Seconds of recoveries, by phase."
_COUNTERS = {  # their help; of _SECONDS, which is one metric, they are the phases
    "recoveries": "Recoveries of the workers, from deaths and from restarts that were asked for.",
    "recomputed": "Requests that were computed again after a restart.",
    "suspects": "Requests that were tried alone, as they had been running at several losses.",
    "ended": "Requests that could not be continued, and ended with an error.",
    "restart": _SECONDS,
    "restore": _SECONDS,
}
_PREFIX = "phalanx-vllm-"
_LONGEST = 70  # characters; sockets named by a UUID fit in, as the kernel takes 107 in all


class EngineEnded(RuntimeError):
    """The workers of an engine have ended for good; with the crash report of their last death."""


class EngineRecovering(RuntimeError):
    """The workers of an engine are being restarted; its requests wait."""


class EngineState:
    """The state of an engine core's workers, as it reports it; any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._said: dict[str, Any] = dict.fromkeys(_COUNTERS, 0)
        self._said |= {"phase": "serving", "cause": ""}
        for file in _files():
            if not Path(f"/proc/{file.stem}").exists():  # of an engine before this one
                file.unlink(missing_ok=True)
        self._write()

    def set(self, phase: str, cause: str = "") -> None:
        """Note that the workers serve, are ``recovering`` or have ``ended`` for good, and why."""
        with self._lock:
            if self._said["phase"] != "ended":
                self._said |= {"phase": phase, "cause": cause}
                self._write()

    def add(self, **amounts: float) -> None:
        """Add to counters."""
        with self._lock:
            for name, amount in amounts.items():
                self._said[name] += amount
            self._write()

    def _write(self) -> None:
        where = os.environ.get(_VARIABLE)
        # In one step: this process may be about to end, and the client about to read.
        with suppress(OSError):
            if where is not None:
                with tempfile.NamedTemporaryFile("w", dir=where, delete=False) as file:
                    json.dump(self._said, file)
                Path(file.name).replace(Path(where) / f"{os.getpid()}.json")


def _files() -> Iterator[Path]:
    where = os.environ.get(_VARIABLE)
    return iter(()) if where is None else Path(where).glob("*.json")


def read_states() -> list[dict[str, Any]]:
    """Return what the engine cores of this client have said last."""
    states: list[dict[str, Any]] = []
    for file in _files():
        with suppress(OSError):
            states.append(json.loads(file.read_text()))
    return states


def cause_of_end() -> str:
    """Return why engine cores of this client have ended; empty if none has."""
    return "\n".join(each["cause"] for each in read_states() if each["phase"] == "ended")


class HealthRoute:
    """Has the route ``/health`` of vLLM's server say how the workers are; an ASGI middleware.

    While they recover ``/health?ready`` answers 503, for a readiness probe, and ``/health`` 200,
    since a restart of the server would lose what it serves.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] != "http" or scope["path"] != "/health":
            return await self._app(scope, receive, send)
        phases = {each["phase"] for each in read_states()}
        worst = next((each for each in ("ended", "recovering") if each in phases), "serving")
        is_late = worst == "ended" or (worst != "serving" and b"ready" in scope["query_string"])

        async def tell(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (b"x-phalanx-workers", worst.encode())]
                status = 503 if is_late else message["status"]
                message = {**message, "headers": headers, "status": status}
            await send(message)

        return await self._app(scope, receive, tell)


class _Metrics:
    """Adds the states to what the client's process exports for Prometheus."""

    def collect(self) -> Iterator[Any]:
        """Yield them as they are."""
        from prometheus_client import core  # noqa: PLC0415  # vLLM brings it

        states = read_states()
        counter, name = core.CounterMetricFamily, "vllm:phalanx_recovery_seconds"
        spent = counter(name, _SECONDS, labels=["phase"])
        for name, text in _COUNTERS.items():
            total = sum(each[name] for each in states)
            if text == _SECONDS:
                spent.add_metric([name], total)
            else:
                yield counter(f"vllm:phalanx_{name}", text, value=total)
        yield spent
        recovering = sum(each["phase"] == "recovering" for each in states)
        text = "Engines whose workers are being restarted."
        yield core.GaugeMetricFamily("vllm:phalanx_recovering", text, value=recovering)


def register() -> None:
    """Have processes below a client, such as several API servers, report the end of its engines.

    vLLM calls it in each of its processes (``vllm.general_plugins``). In any other process it does
    nothing, and imports nothing of vLLM.
    """
    if _VARIABLE in os.environ:
        from .compat import EngineDeadError  # noqa: PLC0415  # where there is something to tell

        serve_states(EngineDeadError)


@cache
def serve_states(error: type[Exception]) -> None:
    """Name the folder, unless a process above has; add it to the metrics and to vLLM's *error*.

    Once in a process.
    """
    named = os.environ.get(_VARIABLE)
    if named is None or not Path(named).is_dir():  # it was that of a client that has ended
        _remove_abandoned()
        os.environ[_VARIABLE] = folder = _make_folder()
        atexit.register(_remove, folder, os.getpid())
        if os.environ.get(_SOCKETS, named) == named:
            os.environ.pop(_SOCKETS, None)
            if len(folder) <= _LONGEST:
                os.environ[_SOCKETS] = folder
    with suppress(ImportError):
        from prometheus_client import REGISTRY  # noqa: PLC0415  # vLLM brings it

        REGISTRY.register(_Metrics())
    changed: Any = error
    init = changed.__init__

    def tell(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if cause := cause_of_end():
            self.args = (f"{self.args[0]} {cause}", *self.args[1:])

    changed.__init__ = tell  # vLLM has no other way in


def _make_folder() -> str:
    """Return a new folder, which is this process's for as long as it lives."""
    while True:
        folder = tempfile.mkdtemp(prefix=_PREFIX)
        with suppress(FileNotFoundError):  # another process took it for abandoned
            held = _lock(folder, fcntl.LOCK_SH)
            if Path(folder).exists():
                return folder
            os.close(held)


def _lock(folder: str | Path, how: int) -> int:
    """Lock *folder*; return the descriptor that holds the lock."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, how)
    except OSError:
        os.close(held)
        raise
    return held


def _remove_abandoned() -> None:
    """Remove the folders of clients that were killed, which the kernel has unlocked."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # in use, or another user's
            held = _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(held)


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
