"""Models in folders."""
