"""The driver's end: options, the seam to an engine that starts nodes, the owner of their state."""
