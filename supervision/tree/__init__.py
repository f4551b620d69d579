"""The supervisor at work: actors, clocks and timers that run the core and real children."""
