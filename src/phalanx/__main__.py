"""``python -m phalanx`` is ``phalanx``."""

from __future__ import annotations

import sys

from phalanx.cli import main

if __name__ == "__main__":
    sys.exit(main())
