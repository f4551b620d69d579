"""The search for a minimal reproducer: ddmin over schedules, with replays."""
