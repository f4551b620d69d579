"""Ray as the engine: it finds machines and starts one process on each; what dies is ours to say.

Only `broker_main`, a process beside the driver, and `agent`, an actor on a node, import Ray.
"""
