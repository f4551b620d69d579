"""The driver's end: options, the interface of engines, the owner and the pool of nodes."""
