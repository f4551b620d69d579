"""`phalanx.testing`: a pytest plugin for tests of users' own workers.

Guarantees: loading it costs no import beyond `phalanx` itself, and changes nothing about tests
that do not ask for it; a mistake in a marker or an option is a usage error, by name, before any
test runs.

pytest loads it by its entry point. It brings the fixtures `chaos`, `leak_check`, `leak_scope` and
`phalanx_runtime`, the marker ``@pytest.mark.chaos(...)`` and the option ``--chaos-seed``; see
docs/chaos.md.
"""

from __future__ import annotations

from importlib import import_module

try:
    import_module("pytest")  # each file here needs it
except ImportError as error:
    msg = "phalanx.testing is a plugin of pytest, which is not installed; install pytest"
    raise ImportError(msg, name="pytest") from error

from .chaos_runs import ChaosRuns, chaos
from .hooks import (
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_report_header,
    pytest_runtest_makereport,
    pytest_runtest_setup,
)
from .leaks import LeakScope, leak_check, leak_scope, phalanx_mark, phalanx_runtime

__all__ = [
    "ChaosRuns",
    "LeakScope",
    "chaos",
    "leak_check",
    "leak_scope",
    "phalanx_mark",
    "phalanx_runtime",
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_report_header",
    "pytest_runtest_makereport",
    "pytest_runtest_setup",
]
