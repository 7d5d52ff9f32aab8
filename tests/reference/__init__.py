"""Slow, literal reference implementations; used by the tests only."""
