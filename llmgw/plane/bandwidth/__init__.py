"""Bandwidth tests between nodes: planned from both nodes' facts, run on both, graded, kept (rules E)."""
