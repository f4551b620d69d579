"""The control link of a node: its messages, the driver's gateway for all of them, the node's end.

Not here: calls and their answers, which have separate links.
"""
