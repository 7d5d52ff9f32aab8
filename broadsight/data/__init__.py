"""Samples and what becomes of them on the way to a model; knows no model."""
