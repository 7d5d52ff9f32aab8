"""Edits any model: another pooling, context broadcasting, feature pyramids, folded norms."""
