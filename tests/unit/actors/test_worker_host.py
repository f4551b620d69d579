"""The worker's side of a start: the state that it restores."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.actors import WorkerActor
from phalanx.actors.worker_side.user_object import WorkerHost
from phalanx.runtime import Kind, Payload, RemoteFailure, encode
from phalanx.runtime.wire.packet_decoder import unpack
from phalanx.supervision import RuntimeFault


def test_a_state_that_was_lost_on_its_way_fails_the_start_with_the_reason() -> None:
    lost = RemoteFailure.of(RuntimeFault("there was no room"))
    payload = Payload.of(encode(lost, "the error"))
    frame = unpack(payload.packet(Kind.RESTORE, epoch=1, call_id=0), [])
    config: Any = SimpleNamespace(probe=b"", trace={}, keywords=b"", restoring=((0, 1),))
    context: Any = SimpleNamespace(rank=1, incarnation=2)
    factory: Any = SimpleNamespace(build=lambda _: WorkerActor())
    link: Any = SimpleNamespace(receive=lambda: frame, original=b"\1")

    with pytest.raises(RuntimeFault, match="the state to restore was lost: there was no room"):
        WorkerHost(config, context, factory, link).start()
