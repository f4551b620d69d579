"""Ray as the engine: finds machines, starts a process on each; phalanx decides what is lost.

Only `broker_main`, a process beside the driver, and `agent`, an actor on a node, import Ray.
"""
