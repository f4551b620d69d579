"""Experiments on a machine with one GPU: what `docs/gpu.md` says of phalanx on real hardware.

Each ends by itself within its limit, writes what it has measured at once, and leaves nothing. None
touches MIG, compute mode, MPS, or resets the GPU. ``--rehearse`` runs the same code without a GPU.
"""
