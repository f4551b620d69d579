"""The rendezvous of torch.distributed, and the abort of process groups."""
