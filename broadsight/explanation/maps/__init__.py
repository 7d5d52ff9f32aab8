"""What a model looked at, as maps over the image: one file for each kind of layer."""
