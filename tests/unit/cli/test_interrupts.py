"""Ctrl-C in a command that ends in an orderly way."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest

from phalanx.cli.terminal import ctrl_c

LONG = 60.0


def test_a_ctrl_c_in_the_middle_of_a_wait_for_it_is_not_lost() -> None:
    stop = threading.Event()
    with ctrl_c(stop):
        inside: Any = stop
        with inside._cond:  # as `wait` holds it, for some instructions
            signal.raise_signal(signal.SIGINT)

        assert stop.wait(LONG)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
