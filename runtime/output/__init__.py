"""Worker stdout, stderr and logs, from the pipe to tail buffer, terminal and stream."""
