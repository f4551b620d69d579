"""Running supervisors: actors, clocks and timers that drive the core and its children."""
