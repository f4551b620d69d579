"""The transport of the tests' executors that choose none themselves; `make test-zmq` names it."""

from __future__ import annotations

import os
from typing import Any

from phalanx.runtime import Zmq

NAMED: Any = os.environ.get("PHALANX_TEST_TRANSPORT", "local")
TRANSPORT: Any = Zmq(ipc=True) if NAMED == "ipc" else NAMED
