"""Plots, and drawing of boxes, masks, keypoints and class maps."""
