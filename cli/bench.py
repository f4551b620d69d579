"""``phalanx bench``: measure calls, deaths and starts, here and elsewhere.

Left to others: everything; see `phalanx.bench`.
"""

from __future__ import annotations

from phalanx.bench import add_arguments, run

__all__ = ["add_arguments", "run"]
