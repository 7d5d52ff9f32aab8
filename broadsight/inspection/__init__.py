"""Reads any model and changes none: shapes, blocks and branches, attention, activations, operation counts."""
