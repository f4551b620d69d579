"""`JoinedNodes`: options of nodes that join by themselves, and the key that they share."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cluster.driver.brokered_engine import BrokeredEngine
from phalanx.cluster.driver.options import ClusterOptions
from phalanx.supervision import SpecError, check_count, check_kind, check_number

if TYPE_CHECKING:
    from phalanx.runtime import EventLoop

VARIABLE = "PHALANX_NODE_KEY"
"""The environment variable that has the key, unless a file has it."""

_SHORTEST = 32  # characters of a key: 16 random bytes in hexadecimal


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedNodes(ClusterOptions):
    """Machines on which a launcher runs ``phalanx node --join HOST:PORT``: `srun`, or a pod.

    The driver listens for them at *port* of *bind*, and waits for as many as it needs; others wait
    until they are needed. Driver and nodes prove to each other that they have the same key. *bind*
    and *ranks_per_node* have to be given.

    Attributes:
        port: 1 to 65535.
        key_file: A file with the key, 32 characters or more, which only its owner and group may
            read. None takes the key from the environment variable ``PHALANX_NODE_KEY``.
    """

    port: int = 29600
    key_file: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        ClusterOptions.__post_init__(self)
        if self.bind is None:
            raise SpecError("cluster.bind", None, "give this machine's address, which nodes reach")
        if self.ranks_per_node is None:
            raise SpecError("cluster.ranks_per_node", None, "say it: nodes are not known yet")
        check_number("cluster.port", check_count("cluster.port", self.port), 1, 65535)
        if self.key_file is not None:
            check_kind("cluster.key_file", self.key_file, str | os.PathLike)

    def engine(self, loop: EventLoop, *, gpus_per_rank: float) -> BrokeredEngine:
        """See `ClusterOptions`.

        Raises:
            SpecError: there is no key.
        """
        del gpus_per_rank  # a node has those that CUDA_VISIBLE_DEVICES leaves it
        driver, node = secrets_of_key("cluster.key_file", self.key_file)
        opening = {
            "address": self.bind,
            "port": self.port,
            "driver": driver.hex(),
            "node": node.hex(),
            "ranks_per_node": self.ranks_per_node,
            "silence": 3 * self.node_timeout,  # a cut that a node outlives is to part nothing
        }
        module = "phalanx.cluster.join.broker_main"
        return BrokeredEngine(loop, "join broker", module, opening, tells_end=True)


def secrets_of_key(field: str, file: str | os.PathLike[str] | None) -> tuple[bytes, bytes]:
    """Return the secrets of the driver and of all nodes, 32 bytes each, which a key stands for.

    Raises:
        SpecError: *file*, or the environment, has no key; or others may read the file.
    """
    key, remedy = os.environ.get(VARIABLE, ""), f"name a file with a key, or set {VARIABLE}"
    if file is not None:
        try:
            key, mode = Path(file).read_text(encoding="utf-8"), Path(file).stat().st_mode
        except (OSError, ValueError) as error:
            raise SpecError(field, file, f"{error}; {remedy}") from None
        if mode & 0o007:
            raise SpecError(field, file, f"others may read it: chmod o= {file}")
    if len(key := key.strip()) < _SHORTEST:
        remedy += f": {_SHORTEST} characters or more, as `openssl rand -hex 32` makes them"
        raise SpecError(field, file, remedy)
    driver, node = (
        hashlib.blake2b(key.encode(), digest_size=32, person=whose).digest()
        for whose in (b"phalanx driver", b"phalanx node")
    )
    return driver, node
