"""The control link of a node: its messages, the driver's gateway for all of them, the node's end.

Left to others: calls and their answers, which have links of their own.
"""
