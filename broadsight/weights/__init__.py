"""Weights in files: read without unpickling, loaded strictly, found in packages and releases."""
