"""Fabrics as the plane watches them: who looks, what was seen, what it means, what is kept."""
