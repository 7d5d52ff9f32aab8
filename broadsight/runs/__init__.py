"""Trained models ready for use: opened from run folders, timm names and saved folders."""
