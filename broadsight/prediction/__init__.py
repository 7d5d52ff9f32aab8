"""What a trained model says of images that nobody has labelled."""
