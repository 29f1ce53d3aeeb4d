"""Mini Harness: at most B dispatches, never a blind repeat, outcome verified or declared unknown."""

__version__ = "0.1.0"
