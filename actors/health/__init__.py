"""Health of ranks: hang detection, heartbeats, and the state of silent ranks."""
