"""What changing a model has in common, whatever is changed."""
