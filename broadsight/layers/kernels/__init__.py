"""Fast CPU forms of what the layers compute, and the one rule that says when they are used."""
