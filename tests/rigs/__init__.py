"""Stand-ins for hardware, made of the real tools."""
