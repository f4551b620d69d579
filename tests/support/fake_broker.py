"""A broker that offers every machine that is requested, and records its orders."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    opening = json.loads(control.recv(1 << 17))

    def tell(**what: object) -> None:
        control.send(json.dumps(what).encode())

    tell(address="10.0.0.1", ranks_per_node=4)
    while data := control.recv(1 << 17):
        order = json.loads(data)
        with Path(opening["journal"]).open("a") as journal:
            journal.write(json.dumps(order) + "\n")
        match order:
            case {"reserve": numbers}:
                for number in numbers:
                    tell(node=number, offered=True)
            case {"start": number}:
                tell(shortage="there are 3 kettles")
                tell(refused="it is no kettle", address="10.0.0.9")
                tell(node=number, key=f"key of {number}")
                tell(node=number, unreached="it is behind a wall")
                tell(node=number, doubt="it hums")
                tell(engine_gone="the stove is cold")
                tell(node=number, gone="it boiled", swept=True)
            case {"release": number}:
                tell(node=number, released=True)
            case _:
                raise AssertionError(order)
