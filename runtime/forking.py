"""Processes forked from a zygote: the zygote's life, and what is asked of it.

Guarantees: what was forked is a child of this process when `Forker.fork` returns, or nothing is
left of it. A zygote that died is replaced, also one that had to be killed because it was stopped
while a fork waited for it, and a fork that was under way then is done again; it cannot have
happened twice, because nothing runs in a new process before its `let_go`. Where forking is not
safe, one event says so and `fork` returns False from then on.

Left to others: the zygote's own end (`zygote_main`), and letting the processes go (`launcher`).
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from phalanx.supervision import RuntimeFault, SpecError

from . import ledger, subreaper
from .events import ForkUnsafe, ZygoteReplaced
from .vigil import LOOK, Vigil
from .zygote import Zygote, ZygoteSaid

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .events import LoggedEvent
    from .hub import Hub
    from .marks import TreeMark
    from .reaping import Reapings
    from .start_request import StartRequest

_ATTEMPTS = 3  # how often a launch is begun anew because its zygote died under it
_CALM = 1.0  # seconds a zygote must live before its death is answered at once


@dataclass(slots=True, eq=False)
class _Boot:
    """One zygote and what has become of it."""

    zygote: Zygote
    is_ready: bool = False
    is_gone: bool = False
    was_stopped: bool = False
    error: Callable[[], Exception] | None = None
    waiting: dict[int, StartRequest] = field(default_factory=dict[int, "StartRequest"])


class Forker:
    """Forks processes. Thread-safe; the arguments are those of `Launcher`.

    Args:
        reapings: Who collects what came of a fork that failed.
    """

    def __init__(
        self,
        hub: Hub,
        mark: TreeMark,
        reapings: Reapings,
        *,
        preload: Sequence[str],
        start_timeout: float,
        emit: Callable[[LoggedEvent], None],
    ) -> None:
        for name in preload:
            if not all(part.isidentifier() for part in name.split(".")):
                raise SpecError("preload", name, "name importable modules, such as 'torch'")
        if start_timeout <= 0:
            raise SpecError("start_timeout", start_timeout, "give a positive number of seconds")
        self._hub = hub
        self._mark = mark
        self._reapings = reapings
        self._preload = tuple(preload)
        self._start_timeout = start_timeout
        self._emit = emit
        self._condition = threading.Condition()
        self._boot: _Boot | None = None
        self._ending: Zygote | None = None  # since `close`
        self._unfit = ""
        self._closed = False

    @property
    def zygote_pid(self) -> int | None:
        """The zygote; None while there is none that can fork."""
        boot = self._boot
        return boot.zygote.pid if boot is not None and boot.is_ready else None

    def warm(self) -> None:
        """Boot the zygote now, without waiting for it."""
        with self._condition:
            if self._boot is None and not self._unfit and not self._closed:
                self._start_zygote()

    def fork(self, requests: list[StartRequest], deadline: float, vigil: Vigil) -> bool:
        """Have the zygote fork all of *requests*; return False where it must not fork.

        Raises:
            SpecError: a module of the preload does not import, or a descriptor is not open.
            RuntimeFault: it could not be done by *deadline*, on the monotonic clock, or is not
                wanted any more.
        """
        for _ in range(_ATTEMPTS):
            boot = self._ready_zygote(deadline, vigil)
            if boot is None:
                return False
            subreaper.open_window()
            try:
                if self._ask(boot, requests, deadline, vigil):
                    return True
            finally:
                with self._condition:
                    for request in requests:
                        boot.waiting.pop(request.number, None)
                if subreaper.close_window():
                    self._reapings.take_adopted()
            for request in requests:
                # It has not been told to go, so it is as if it had never been.
                self._reapings.discard(request)
            if self._unfit:
                return False
        msg = f"the zygote died {_ATTEMPTS} times during one launch; see its stderr"
        raise RuntimeFault(msg)

    def close(self, deadline: float) -> None:
        """End the zygote, or try again; who waits for it hears that the launcher was closed."""
        with self._condition:
            self._closed = True
            if self._boot is not None:
                self._ending, self._boot = self._boot.zygote, None
            self._condition.notify_all()
            zygote = self._ending
        if zygote is not None:
            zygote.close(deadline)

    # --- one launch, in the caller's thread -----------------------------------------------

    def _ask(
        self, boot: _Boot, requests: list[StartRequest], deadline: float, vigil: Vigil
    ) -> bool:
        """Return True when all of *requests* are our children, False where the zygote is gone."""
        with self._condition:
            boot.waiting.update({request.number: request for request in requests})
        for request in requests:
            try:
                self._request(boot, request, deadline, vigil)
            except TimeoutError:
                break
            except OSError:
                request.check_fds()
                break  # the zygote is gone; word of it is on its way
        with self._condition:
            while not all(request.state == "parted" for request in requests):
                problem = next((r.problem for r in requests if r.problem), "")
                if problem:
                    msg = f"could not start {requests[0].spec.label!r}: {problem}"
                    raise RuntimeFault(msg)
                if boot.is_gone or self._unfit:
                    return False
                late = f"{requests[0].spec.label!r} was not there in time"
                self._wait(boot, deadline, late, vigil)
        return True

    def _request(self, boot: _Boot, request: StartRequest, deadline: float, vigil: Vigil) -> None:
        """Ask the zygote for one process; raises as `Zygote.request` does."""
        while True:
            vigil.check()
            until = min(deadline, time.monotonic() + LOOK)
            try:
                boot.zygote.request(request.number, request.fds, until)
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise
                self._look(boot, vigil)
            else:
                return

    def _ready_zygote(self, deadline: float, vigil: Vigil) -> _Boot | None:
        """Return a zygote that forks, or has just died; None where none may be used here."""
        with self._condition:
            if self._unfit:
                return None
            boot = self._boot or self._start_zygote()
            limit = boot.zygote.started_at + self._start_timeout
            while not boot.is_ready and boot.error is None and not boot.is_gone:
                if time.monotonic() >= limit:
                    boot.zygote.kill()
                    msg = (
                        f"the zygote had not imported {self._imports} within "
                        f"start_timeout={self._start_timeout:.3g} s and was ended: what imports "
                        "for so long, or hangs, is for the workers to import; leave it out of "
                        "preload"
                    )
                    raise RuntimeFault(msg)
                until = min(deadline, limit)
                self._wait(
                    boot,
                    until,
                    f"the zygote had not imported {self._imports} in the "
                    f"{until - boot.zygote.started_at:.3g} s since it was started, and goes on "
                    "importing; raise start_timeout, or leave it out of preload",
                    vigil,
                    raises=deadline < limit,
                )
            if boot.error is not None:
                raise boot.error()
            return None if self._unfit else boot

    @property
    def _imports(self) -> str:
        """What the zygote imports, for people."""
        return ", ".join(self._preload) or "phalanx"

    def _wait(
        self, boot: _Boot, deadline: float, late: str, vigil: Vigil, *, raises: bool = True
    ) -> None:
        """Wait a while for news, and at *deadline* raise *late*; the condition is held."""
        if self._closed:
            msg = "the launcher was closed"
            raise RuntimeFault(msg)
        if self._condition.wait(max(0.0, min(deadline - time.monotonic(), LOOK))):
            return
        # Only now: what is being forked is there in a moment, and can then be ended for certain.
        vigil.check()
        if time.monotonic() < deadline:
            self._look(boot, vigil)
        elif raises:
            raise RuntimeFault(late)

    def _look(self, boot: _Boot, vigil: Vigil) -> None:
        if vigil.look(boot.zygote):
            boot.was_stopped = True

    # --- the zygote, on the hub's thread --------------------------------------------------

    def _start_zygote(self) -> _Boot:
        if self._closed:
            msg = "the launcher was closed"
            raise RuntimeFault(msg)
        zygote = Zygote(
            self._hub,
            self._mark,
            self._preload,
            on_message=self._on_message,
            on_exit=self._on_exit,
        )
        self._boot = _Boot(zygote)
        return self._boot

    def _on_message(self, zygote: Zygote, said: ZygoteSaid) -> None:
        with self._condition:
            boot = self._boot
            known = boot if boot is not None and boot.zygote is zygote else None
            waiting = known.waiting if known is not None else {}
            requests = [waiting[number] for number in said.ids if number in waiting]
            match said.kind:
                case "ready":
                    if known is not None:
                        known.is_ready = True
                    if said.text:
                        self._note_unfit(said.text)
                case "import_failed":
                    if known is not None:
                        known.error = lambda: _import_error(said)
                case "born":
                    if said.pidfd < 0:
                        # It came without: this process had none free. It waits for the word to
                        # go, which never comes, and ends.
                        self._reapings.take_number(said.pid)
                        for request in requests:
                            request.problem = "the driver had no descriptor free for its pidfd"
                    elif requests:
                        requests[0].state = "born"
                        requests[0].pid = said.pid
                        requests[0].pidfd = ledger.own(said.pidfd)
                        subreaper.claim(said.pid)
                    else:
                        self._reapings.take(said.pidfd, said.pid, kill=True)
                case "parted":
                    for request in requests:
                        if request.state == "born":
                            request.state = "parted"
                        else:
                            request.problem = request.problem or "it was killed while being forked"
                case "refused":
                    for request in requests:
                        request.problem = said.text
                case "unfit":
                    self._note_unfit(said.text)
            self._condition.notify_all()

    def _note_unfit(self, problem: str) -> None:
        if not self._unfit:
            self._unfit = problem
            self._emit(ForkUnsafe(problem=problem, at=time.monotonic()))
        if self._boot is not None:
            self._boot.zygote.kill()

    def _on_exit(self, zygote: Zygote, how: str) -> None:
        with self._condition:
            boot = self._boot
            if boot is None or boot.zygote is not zygote:
                return
            boot.is_gone = True
            self._boot = None
            if boot.was_stopped:
                how = "it was stopped while processes were to be forked, and was killed"
            elif not boot.is_ready and boot.error is None:
                msg = f"the zygote ended while it imported {self._imports}: {how}"
                boot.error = lambda: RuntimeFault(msg)
            self._condition.notify_all()
            is_replaced = boot.is_ready or boot.was_stopped
            if not is_replaced or self._unfit or self._closed:
                return
        lived = time.monotonic() - zygote.started_at
        # Whatever kills it at once must not make us start processes in a loop.
        wait = max(0.0, _CALM - lived)
        self._hub.call_at(time.monotonic() + wait, lambda: self._replace(zygote.pid, how))

    def _replace(self, dead: int, how: str) -> None:
        with self._condition:
            if self._closed:
                return
            boot = self._boot or self._start_zygote()
        pid = boot.zygote.pid
        self._emit(ZygoteReplaced(pid=pid, replaced=dead, reason=how, at=time.monotonic()))


def _import_error(said: ZygoteSaid) -> SpecError:
    last = said.text.strip().rpartition("\n")[2]
    error = SpecError("preload", said.module, f"it does not import in the zygote: {last}")
    error.add_note(said.text)
    return error
