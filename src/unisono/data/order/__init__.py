"""The order: which sample stands where, a pure function decided before anything is read."""
