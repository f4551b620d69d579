"""``python -m phalanx_peers NAME``: one contestant, that does as its standard input says."""

from __future__ import annotations

import sys

from . import contestant
from .protocol import serve

if __name__ == "__main__":
    serve(contestant(sys.argv[1]))
