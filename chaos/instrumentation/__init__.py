"""Observation of a run: probes in the driver and in its workers, and leak detection."""
