"""How good a model is: on the data it was trained for, and on sets made to try it."""
