"""Membership of a rank group: starts, watches, replaces and stops workers."""
