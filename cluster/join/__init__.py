"""Nodes that join by themselves, as an engine: `phalanx node` on each machine, and their broker."""
