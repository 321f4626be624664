"""Runs LLM engines on GPU fleets joined by InfiniBand or RoCE, and tells why they do not work."""

__version__ = "0.2.0"
