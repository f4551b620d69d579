"""One process on its way: what it is started with, and how far it has come.

Guarantees: it begins nothing before `let_go`; the descriptors that only the start needs are closed
by `close`, once.

Left to others: bringing it into the world (`forking`, `interpreter`), and taking its pidfd over.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from phalanx.supervision import SpecError

from . import ledger

if TYPE_CHECKING:
    from .launch_spec import LaunchSpec
    from .marks import WorkerMark


@dataclass(slots=True, eq=False)
class StartRequest:
    """One process on its way.

    Attributes:
        number: What its starter calls it.
        file: Holds its birth, for the child to read.
        go: Our end of the pipe at whose other end, *awaits*, the child waits for word.
        state: ``asked``; ``born`` (it exists, and waits); ``parted`` (and is our child).
        pidfd: Ours once it is born, until somebody takes it over; else -1.
        problem: Why it will not be.
    """

    number: int
    spec: LaunchSpec
    mark: WorkerMark
    file: int
    go: int
    awaits: int
    state: Literal["asked", "born", "parted"] = "asked"
    pidfd: int = -1
    pid: int = 0
    problem: str = ""

    @classmethod
    def of(cls, number: int, spec: LaunchSpec, mark: WorkerMark) -> Self:
        """Return a request with descriptors of its own."""
        awaits, go = _pipe()
        try:
            file = ledger.own(spec.birth(mark).to_file())
        except BaseException:
            ledger.close(awaits)
            ledger.close(go)
            raise
        return cls(number, spec, mark, file, go, awaits)

    @property
    def outputs(self) -> tuple[int, int]:
        """The child's 1 and 2, as descriptors of ours; a closed one of ours stays closed."""
        return (
            1 if self.spec.stdout is None else self.spec.stdout,
            2 if self.spec.stderr is None else self.spec.stderr,
        )

    @property
    def fds(self) -> list[int]:
        """What goes to the zygote with the request, in its order."""
        return [self.file, self.awaits, *self.outputs, *self.spec.fds.values()]

    def check_fds(self) -> None:
        """Raise SpecError where the spec names a descriptor that is not open."""
        stdout, stderr = self.outputs
        for name, fd in {**self.spec.fds, "stdout": stdout, "stderr": stderr}.items():
            try:
                os.fstat(fd)
            except OSError as error:
                raise SpecError(f"fds[{name!r}]", fd, "pass an open descriptor") from error

    def let_go(self) -> None:
        """Have it begin."""
        with contextlib.suppress(BrokenPipeError):  # dead already: its death will be told
            os.write(self.go, b"g")

    def take_pidfd(self) -> int:
        """Return the pidfd, which is the caller's from now on, or -1 where there is none."""
        pidfd, self.pidfd = self.pidfd, -1
        return pidfd if pidfd < 0 else ledger.disown(pidfd)

    def begin_anew(self) -> None:
        """Be as if it had never been asked for; what came of it has been killed."""
        self.state = "asked"
        if self.go >= 0:
            # Another pipe for the next attempt: the dying process could still take our word.
            ledger.close(self.go)
            ledger.close(self.awaits)
            self.awaits, self.go = _pipe()

    def close(self) -> None:
        """Close the descriptors that only the start needs."""
        for fd in (self.file, self.go, self.awaits):
            if fd >= 0:
                ledger.close(fd)
        self.file = self.go = self.awaits = -1


def _pipe() -> tuple[int, int]:
    read, write = os.pipe2(os.O_CLOEXEC)
    return ledger.own(read), ledger.own(write)
