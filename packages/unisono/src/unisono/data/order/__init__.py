"""The order of samples: a pure function of the position, decided before anything is read."""
