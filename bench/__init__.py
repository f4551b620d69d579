"""Measuring: what a call, a death and a start cost here, and elsewhere.

Guarantees: every figure we publish comes from a command of this package, on a machine that is named
beside it. What is compared is measured in the same run, in turns.

Left to others: nothing of the library imports from here.
"""

from __future__ import annotations

from .command_line import add_arguments, run

__all__ = ["add_arguments", "run"]
