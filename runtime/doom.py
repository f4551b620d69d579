"""The end of a worker for an error of its own method, where the decider says so.

Guarantees: the answer leaves before the process ends, and before it leaves no further call
is begun any more: what the caller does next finds the next incarnation. The driver is told why.

Left to others: what is decided (`Hosted.judge`), and what follows (the group's actor).
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from phalanx.supervision import Directive, is_broken_process_group

from .remote_failure import RemoteFailure
from .wire import Kind

if TYPE_CHECKING:
    from .link import Link


class Judge(Protocol):
    """Who decides, and whom to tell of the end."""

    def judge(self, error: BaseException) -> Directive:
        """Return what becomes of this worker, whose method raised *error*."""
        ...

    def end_copy(self) -> None:
        """End this process if it is a forked copy of the worker, which has left the user's code."""
        ...

    def fail(self, error: BaseException) -> None:
        """Run the user's failure hook: *error* is about to end this worker."""
        ...


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one error of a method means.

    Attributes:
        directive: What becomes of this worker.
        joined: It is in a process group with others, which may wait for it in a collective
            operation that it has not begun.
        broken: That process group can be used no more.
    """

    directive: Directive
    joined: bool = False
    broken: bool = False

    @property
    def ends(self) -> bool:
        """Whether this worker is about to end."""
        return self.directive is not Directive.RESUME

    @property
    def holds(self) -> bool:
        """Whether this worker begins no later call before the driver lets it."""
        return self.joined and not self.ends


@dataclass(frozen=True, slots=True)
class Failed:
    """What a method, or a hook, raised in place of what it would have returned; weighed."""

    error: BaseException
    verdict: Verdict


class Doom:
    """What errors mean for one worker. Thread-safe: answers are sent by two threads.

    Attributes:
        is_sealed: Whether this process is about to end.
    """

    def __init__(self, link: Link, judge: Judge) -> None:
        self._link = link
        self._judge = judge
        self.is_sealed = False

    def weigh(self, error: BaseException) -> Verdict:
        """Return what *error* means, once; where that is the end, no call is begun any more.

        A process group that broke is formed anew by the driver, which knows of deaths behind it,
        and whether ranks are kept: to be restarted for that is not for each rank to do.
        """
        directive = self._judge.judge(error)
        joined = is_in_process_group()
        broken = joined and is_broken_process_group(error)
        if broken and directive is Directive.RESTART:
            directive = Directive.RESUME
        verdict = Verdict(directive, joined, broken)
        if verdict.ends:
            self.is_sealed = True
        return verdict

    def end_copy(self) -> None:
        """See `Judge.end_copy`."""
        self._judge.end_copy()

    def await_end(self) -> None:
        """Keep this thread from doing anything, while another ends the process."""
        while True:
            time.sleep(60.0)

    def carry_out(self, failed: Failed) -> None:
        """End this process at once, from whichever thread, unless it is to go on."""
        if not failed.verdict.ends:
            return
        error, directive = failed.error, failed.verdict.directive
        failure = RemoteFailure.of(error)
        self._link.tell(Kind.LAST_WORDS, replace(failure, directive=directive.value))
        self._judge.fail(error)
        told = f"{failure.trace}\nended by the decider ({directive}) for the error above\n"
        sys.stderr.write(told)
        sys.stdout.flush()
        sys.stderr.flush()
        # Without clean-up: what has broken a process may hold its clean-up up for ever.
        os._exit(1)


def is_in_process_group() -> bool:
    """Whether this process has joined a process group with others."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return False
    alone: bool = dist.get_world_size() == 1
    return not alone
