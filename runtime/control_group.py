"""Where the kernel keeps the accounts of this process's control groups.

Guarantees: folders of either version, and of both where a machine has both; they need not exist,
nor have the files one looks for.

Left to others: what stands in them (`evidence`, `memory`, `processors`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

MOUNTED = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def group_folders(controller: str, groups: Path = MOUNTED, own: Path = OWN) -> Iterator[Path]:
    """Yield where the files of our control group may be.

    Args:
        controller: Whose accounts, as the kernel calls it: "memory", "cpu".
        groups: Where the control groups are mounted.
        own: The file that says which of them this process is in.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mounts: tuple[str, ...] = ("", "unified")
        elif controller in controllers.split(","):
            # Controllers that are mounted together share a folder of all their names.
            mounts = tuple(dict.fromkeys((controller, controllers)))
        else:
            continue
        yield from (groups / mount / path.lstrip("/") for mount in mounts)


def nearest(folder: Path, groups: Path = MOUNTED) -> Path:
    """Return *folder*, or where that is not to be seen the nearest around it that is.

    In a container the path may be one of the host's: then the mount is that very group.
    """
    return next((each for each in enclosing(folder, groups) if each.is_dir()), folder)


def enclosing(folder: Path, groups: Path = MOUNTED) -> Iterator[Path]:
    """Yield *folder* and those of the groups around it.

    In a container the path may be one of the host's, of which nothing is to be seen here: then the
    container's own group is the last.
    """
    while folder not in (groups.parent, folder.parent):
        yield folder
        folder = folder.parent
