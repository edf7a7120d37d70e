"""How a script is started: with which arguments, seeds and variables, without a GPU, and without dropout."""
