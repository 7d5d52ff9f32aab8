"""Measurements of what a network does inside. They read models and never change them."""
