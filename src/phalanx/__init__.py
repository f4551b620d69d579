"""Phalanx: supervised GPU worker actors."""
