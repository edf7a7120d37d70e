"""What the encoder is trained for: each objective is a module that returns numbers of each row."""
