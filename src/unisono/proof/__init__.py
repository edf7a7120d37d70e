"""Numerical evidence that many processes compute what one computes, from running a task under several layouts."""
