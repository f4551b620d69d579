"""How every process of a tree is known again: a mark in its environment.

Guarantees: each worker's mark is unique among all that were ever started by this driver, lies
within the mark of its tree, and is inherited by whatever the worker starts, daemons too. A tree
inside a worker of another tree carries both marks, so ending the outer one finds the inner one's
strays.

Left to others: reading the marks (`tree`). What clears its environment *and* leaves its session
cannot be found by its mark.

Imports nothing but the standard library: the guardian uses it.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

VARIABLE = "PHALANX_TREE"
_LABEL_BYTES = 160  # what a label may take; longer ones are cut, the number keeps them apart
_FILL = ";"


@dataclass(frozen=True, slots=True)
class TreeMark:
    """The mark of one driver's tree.

    Attributes:
        outer: The marks of the trees around it, as found in this process's own environment.
        tree: Its name, never used twice.
    """

    outer: str
    tree: str

    @classmethod
    def new(cls, environ: dict[str, str]) -> TreeMark:
        """Return a mark for a new tree in a process that has *environ*."""
        outer = environ.get(VARIABLE, "").rstrip(_FILL)
        return cls(outer + _FILL if outer else "", uuid.uuid4().hex)

    @property
    def needle(self) -> bytes:
        """What the environment of each process of the tree contains."""
        return f"{self.tree}/".encode()

    def of(self, number: int, label: str) -> WorkerMark:
        """Return the mark of the process with this *number*, unique in the tree."""
        clean = "".join(c if c.isascii() and c.isprintable() and c != ";" else "_" for c in label)
        return WorkerMark(self, f"{self.tree}/{number}.{clean[:_LABEL_BYTES]}{_FILL}")


@dataclass(frozen=True, slots=True)
class WorkerMark:
    """The mark of one process and of all that comes from it."""

    tree: TreeMark
    own: str

    @property
    def needle(self) -> bytes:
        """What the environment of the process, and of all that comes from it, contains."""
        return self.own.encode()

    @property
    def value(self) -> str:
        """The variable's value: always of one length in one tree, so one can replace another."""
        width = len(self.tree.outer) + len(self.tree.tree) + _LABEL_BYTES + 24
        return (self.tree.outer + self.own).ljust(width, _FILL)
