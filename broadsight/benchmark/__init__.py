"""Speed and memory of models, measured side by side in interleaved rounds."""
