"""Crash matrix: whatever dies, whenever it dies, are there ever two of a shard, or none, or one nobody knows of?"""

from benchmarks.crash.matrix import main

__all__ = ["main"]
