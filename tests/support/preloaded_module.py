"""A module to preload: what the zygote has imported before it."""

import sys

IMPORTED = frozenset(sys.modules)
