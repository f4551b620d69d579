"""Metrics for Prometheus, and health routes for Kubernetes: ``with MetricsServer(): ...``.

A process beside the driver follows the driver's event stream, as ``phalanx top`` does, and serves
``/metrics``, ``/healthz`` and ``/readyz``. ``phalanx metrics`` is the same without a change
to the program. Metrics, labels and alerts: ``docs/reference/metrics.md``.
"""

from __future__ import annotations

from .server import MetricsServer

__all__ = ["MetricsServer"]
