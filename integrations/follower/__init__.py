"""Serving a driver from outside: following its event stream, and listening for HTTP."""
