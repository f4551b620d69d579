"""Where the kernel keeps the accounts of this process's control group.

Guarantees: folders of either version, and of both where a machine has both; they need not exist,
nor have the files one looks for.

Left to others: what stands in them (`evidence`, `memory`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT = Path("/sys/fs/cgroup")


def group_folders() -> Iterator[Path]:
    """Yield where the files of our control group may be."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mounts: tuple[str, ...] = ("", "unified")
        else:
            mounts = ("memory",) if "memory" in controllers.split(",") else ()
        yield from (_ROOT / mount / path.lstrip("/") for mount in mounts)


def enclosing(folder: Path) -> Iterator[Path]:
    """Yield *folder* and those of the groups around it.

    In a container the path may be one of the host's, of which nothing is to be seen here: then the
    container's own group is the last.
    """
    while folder not in (_ROOT.parent, folder.parent):
        yield folder
        folder = folder.parent
