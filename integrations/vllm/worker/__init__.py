"""The code in the process of a rank, and in the process that it is forked from."""
