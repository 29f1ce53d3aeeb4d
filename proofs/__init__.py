"""The kill matrix: real processes, real signals, and a world whose own books are read afterwards."""
