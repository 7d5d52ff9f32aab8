"""What is learned, by task: the step, the loss, the figures of an evaluation."""
