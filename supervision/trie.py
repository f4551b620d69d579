"""A map that is a value: a change returns a new map, which shares all but a few nodes with the old.

Guarantees: look-up, change and removal touch one path of a tree 16 wide, so that they cost the
same for ten children as for a hundred thousand, up to a logarithm; nobody who holds a map sees it
change. Iteration is in no particular order.

Why not a dict: copying one for every event makes a restart cost as much as the supervisor has
children. Why not a dict changed in place: yesterday's state would change under whoever kept it.

Source: P. Bagwell, Ideal Hash Trees (2001), without the bitmap compression.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

K = TypeVar("K", bound="Hashable")
V = TypeVar("V")

_BITS = 4
_WIDTH = 1 << _BITS
_MASK = _WIDTH - 1
_HASH = (1 << 60) - 1
_EMPTY: tuple[None, ...] = (None,) * _WIDTH


@dataclass(frozen=True, slots=True)
class _Leaf:
    """The pairs whose keys have one hash: nearly always a single one."""

    hash: int
    pairs: tuple[tuple[Any, Any], ...]


# Either a tuple of _WIDTH nodes, a leaf, or nothing.
_Node: TypeAlias = "tuple[Any, ...] | _Leaf | None"


class Trie(Generic[K, V]):
    """A persistent hash map."""

    __slots__ = ("_root", "_size")

    def __init__(self) -> None:
        self._root: _Node = None
        self._size = 0

    def get(self, key: K) -> V | None:
        """Return the value of *key*, or None."""
        code = hash(key) & _HASH
        found: V | None = None
        for known, value in _pairs_of(self._root, code):
            if known == key:
                found = value
        return found

    def set(self, key: K, value: V) -> Trie[K, V]:
        """Return the map in which *key* has *value*."""
        code = hash(key) & _HASH
        root, added = _with(self._root, _Leaf(code, ((key, value),)), 0)
        return self._grown(root, self._size + added)

    def without(self, key: K) -> Trie[K, V]:
        """Return the map that lacks *key*, which may be this one."""
        if key not in self:
            return self
        return self._grown(_without(self._root, hash(key) & _HASH, key, 0), self._size - 1)

    def values(self) -> Iterator[V]:
        """Yield every value."""
        stack: list[_Node] = [self._root]
        while stack:
            node = stack.pop()
            if isinstance(node, tuple):
                stack.extend(node)
            elif node is not None:
                for _, value in node.pairs:
                    yield value

    def __contains__(self, key: K) -> bool:
        return self.get(key) is not None

    def __len__(self) -> int:
        return self._size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trie) and self._contents() == other._contents()

    def __hash__(self) -> int:
        return hash(frozenset(self._contents()))

    def _contents(self) -> dict[Any, Any]:
        return dict(_pairs(self._root))

    @staticmethod
    def _grown(root: _Node, size: int) -> Trie[K, V]:
        result: Trie[K, V] = Trie()
        result._root, result._size = root, size
        return result


def _pairs_of(node: _Node, code: int) -> tuple[tuple[Any, Any], ...]:
    """Return the pairs below *node* whose keys have the hash *code*."""
    rest = code
    while isinstance(node, tuple):
        below: _Node = node[rest & _MASK]
        node = below
        rest >>= _BITS
    return node.pairs if node is not None and node.hash == code else ()


def _pairs(node: _Node) -> Iterator[tuple[Any, Any]]:
    if isinstance(node, tuple):
        for below in node:
            yield from _pairs(below)
    elif node is not None:
        yield from node.pairs


def _with(node: _Node, leaf: _Leaf, shift: int) -> tuple[_Node, int]:
    """Return *node* with *leaf*'s one pair below it, and how many keys that adds."""
    if node is None:
        return leaf, 1
    if isinstance(node, _Leaf):
        if node.hash == leaf.hash:
            key = leaf.pairs[0][0]
            kept = tuple(pair for pair in node.pairs if pair[0] != key)
            return _Leaf(leaf.hash, (*kept, *leaf.pairs)), 1 + len(kept) - len(node.pairs)
        branch: tuple[Any, ...] = _EMPTY
        node = _replaced(branch, (node.hash >> shift) & _MASK, node)
    at = (leaf.hash >> shift) & _MASK
    below, added = _with(node[at], leaf, shift + _BITS)
    return _replaced(node, at, below), added


def _without(node: _Node, code: int, key: object, shift: int) -> _Node:
    """Return *node* without *key*, or None where nothing is left below it."""
    if isinstance(node, tuple):
        at = (code >> shift) & _MASK
        branch = _replaced(node, at, _without(node[at], code, key, shift + _BITS))
        # An empty branch must go, or a supervisor of short-lived children grows for ever.
        return None if branch == _EMPTY else branch
    if node is None:
        return None
    kept = tuple(pair for pair in node.pairs if pair[0] != key)
    return _Leaf(node.hash, kept) if kept else None


def _replaced(branch: tuple[Any, ...], at: int, node: _Node) -> tuple[Any, ...]:
    return (*branch[:at], node, *branch[at + 1 :])
