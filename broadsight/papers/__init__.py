"""The published figures, and how each is recomputed."""
