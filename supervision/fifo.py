"""A queue that is a value, for the messages a supervisor keeps while it waits for one.

Guarantees: first in, first out; adding and taking cost the same however long the queue is (a
storm of exits during one slow start must not cost its square).

Source: the two-list queue of C. Okasaki, Purely Functional Data Structures (1998), section 5.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fifo(Generic[T]):
    """Linked pairs: *front* in order, *back* newest first."""

    front: tuple[Any, ...] = ()
    back: tuple[Any, ...] = ()

    def put(self, item: T) -> Fifo[T]:
        """Return the queue with *item* last."""
        return Fifo(self.front, (item, self.back))

    def take(self) -> tuple[T, Fifo[T]]:
        """Return the first item and the queue without it."""
        front, back = self.front, self.back
        if not front:
            while back:
                item, back = back
                front = (item, front)
        if not front:
            raise IndexError("take from an empty queue")
        item, front = front
        return item, Fifo(front, back)

    def __bool__(self) -> bool:
        return bool(self.front or self.back)

    def __iter__(self) -> Iterator[T]:
        rest = self
        while rest:
            item, rest = rest.take()
            yield item
