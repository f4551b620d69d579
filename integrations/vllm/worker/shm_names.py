"""The names in ``/dev/shm`` under which the ranks of one engine open what they share.

Guarantees: each name holds the mark of its engine and its epoch; once all ranks have opened what
they share the names are removed, while the memory stays, so that a worker that is killed leaves
none behind; what a worker that was killed before that has left, the next epoch removes, and at the
end the engine.

vLLM makes such names in two ways: through `multiprocessing.shared_memory`, and in its C++ for CPUs
by the last part of the address where the ranks meet.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import Any

_SHM = Path("/dev/shm")  # noqa: S108  # the kernel's place for them
_LONGEST = 100  # the standard library keeps to 14 characters, for other systems than Linux


def new_mark() -> str:
    """Return a mark that only the names of one engine contain."""
    return f"phx{secrets.token_hex(4)}"


def mark_names(mark: str, epoch: int) -> None:
    """Put *mark* and *epoch* into the names that this process makes from now on."""
    library: Any = shared_memory  # its names for this are not public
    library._SHM_NAME_PREFIX = f"/{_stamp(mark, epoch)}_"  # noqa: SLF001
    library._SHM_SAFE_NAME_LENGTH = _LONGEST  # noqa: SLF001
    shared_memory.SharedMemory.unlink = _unlink  # type: ignore[method-assign]  # see there
    # The library's own tracker would be a process that outlives this one, and that warns of names
    # which it does not find.
    resource_tracker.register = _register  # type: ignore[assignment]


def marked_address(address: str, port: int, mark: str, epoch: int) -> str:
    """Return the rendezvous URL for torch, with *mark* and *epoch* at its end."""
    return f"tcp://{address}:{port}?mark={_stamp(mark, epoch)}"


def remove_names(mark: str, epoch: int | None = None, *, before: bool = False) -> None:
    """Remove the names with *mark*: all, or those of *epoch*, or those of epochs *before* it."""
    for entry in list(_SHM.glob(f"*{mark}e*")):
        own = int(entry.name.partition(f"{mark}e")[2].partition("x")[0])
        if epoch is None or (own < epoch if before else own == epoch):
            with suppress(OSError):
                entry.unlink()


def _stamp(mark: str, epoch: int) -> str:
    return f"{mark}e{epoch}x"


def _unlink(self: shared_memory.SharedMemory) -> None:
    """Remove the name as the library does; it may be gone already."""
    name: str = vars(self)["_name"]
    with suppress(OSError):
        (_SHM / name.lstrip("/")).unlink()


_original = resource_tracker.register


def _register(name: str, kind: str) -> None:
    """Have the library track what is no shared memory."""
    if kind != "shared_memory":
        _original(name, kind)
