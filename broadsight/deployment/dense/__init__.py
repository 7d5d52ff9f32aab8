"""Detectors, segmenters and pose models as exported files: raw outputs, and how findings are made of them."""
