"""The driver's end: the owner of the nodes' state, and the seam to an engine that starts nodes."""
