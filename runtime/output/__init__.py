"""Worker stdout, stderr and logs, from the pipe to tail, terminal and stream."""
