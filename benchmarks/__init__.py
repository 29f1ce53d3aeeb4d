"""The published benchmark: this engine, the floor that SQLite sets, and other engines, in one run. See `__main__`."""
