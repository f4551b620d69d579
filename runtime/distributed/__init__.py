"""Where the ranks of torch.distributed meet."""
