"""What serves a driver from outside: following its stream, and listening for HTTP."""
