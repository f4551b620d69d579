"""Start, watch, signal and collect processes."""
