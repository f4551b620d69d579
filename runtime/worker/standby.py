"""How a spare process becomes a rank: what it is told, and what it changes about itself.

Guarantees: once it has been told, environment, working directory and title are what they would be
had it been started for that rank at that moment; until then it waits without using the processor.

Left to others: what it prepares before, and what runs in it then (`host`, from the layer above).
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.runtime.linux import process_title
from phalanx.runtime.linux.process_tree import VARIABLE
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
        env: The complete environment, but for the mark of the tree.
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
    """Tell the driver that this process is warm; return what it is to become, and become it."""
    link.tell(Kind.STANDBY)
    while True:
        frame = receive(link.control)
        if isinstance(frame, bytes):
            sys.exit(0)  # the driver has gone, or needs us no more
        if isinstance(frame, Frame) and frame.kind == Kind.ASSIGN:
            break
    assignment: Assignment = frame.value()
    link.rank = assignment.rank
    link.incarnation = assignment.incarnation
    link.epoch = assignment.epoch
    mark = os.environ[VARIABLE]
    zone = os.environ.get("TZ")
    os.environ.clear()
    os.environ.update({**assignment.env, VARIABLE: mark})
    if os.environ.get("TZ") != zone:
        time.tzset()
    if assignment.cwd is not None:
        os.chdir(assignment.cwd)
    process_title.show_title(assignment.title)
    return assignment
