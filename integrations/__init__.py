"""Phalanx under other people's engines; each needs an extra, and none is imported by the core."""
