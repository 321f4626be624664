"""A whole InfiniBand fabric in processes: ibsim, opensm and the real diagnostic tools."""
