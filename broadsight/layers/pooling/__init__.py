"""The poolings: multi-token attention, and those that it is compared with."""
