"""Standby process: waits for the assignment of a rank, then adopts it.

Once assigned, environment, working directory and title are those of a process started for that
rank at that moment.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.runtime.linux import process_title
from phalanx.runtime.wire.frame import Frame, receive
from phalanx.runtime.wire.protocol import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .control import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The rank that a spare takes.

    Attributes:
        blob: What the layer above sends to itself.
        env: The complete environment, but for the tag of the tree.
        cwd: None leaves it where it is.
    """

    rank: int
    incarnation: int
    epoch: int
    blob: bytes
    env: Mapping[str, str]
    cwd: str | None
    title: str


def await_assignment(link: Link) -> Assignment:
    """Report that this process is warm, wait for its assignment, adopt it and return it."""
    link.tell(Kind.STANDBY)
    while True:
        frame = receive(link.control)
        if isinstance(frame, bytes):
            sys.exit(0)  # the driver has gone, or does not need this process
        if isinstance(frame, Frame) and frame.kind == Kind.ASSIGN:
            break
    assignment: Assignment = frame.value()
    link.rank = assignment.rank
    link.incarnation = assignment.incarnation
    link.epoch = assignment.epoch
    process_title.adopt(assignment.env, assignment.cwd, assignment.title)
    return assignment
