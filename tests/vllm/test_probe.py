"""The probe agrees with the release that is installed."""

from __future__ import annotations

from phalanx.integrations.vllm import compat


def test_the_installed_release_has_all_that_is_used_of_it() -> None:
    assert compat.differences() == []
