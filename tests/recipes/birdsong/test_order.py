"""Rows of one file do not follow each other more than chance has it: batches are what a shuffle of all rows gives."""

from __future__ import annotations

import numpy as np

from unisono import Order


def test_the_autocorrelation_of_files_is_that_of_a_random_order() -> None:
    """Of n rows in a random order any two neighbours correlate by −1/(n − 1) exactly, whatever is written on them."""
    rows, files, epochs = 24, 4, 4000
    order = Order(rows, seed=3)
    found = np.concatenate([order(np.arange(epoch * rows, (epoch + 1) * rows)) for epoch in range(epochs)])
    numbers = (found.reshape(epochs, rows) // (rows // files)).astype(float)  # which file each row lies in
    centred = numbers - numbers.mean(axis=1, keepdims=True)
    lag = (centred[:, 1:] * centred[:, :-1]).sum(1) / (rows - 1) / centred.var(axis=1)
    expected, error = -1 / (rows - 1), lag.std() / epochs**0.5
    assert abs(lag.mean() - expected) < 4 * error < abs(expected) / 2
    blocks = np.sort(numbers, axis=1)  # file after file, as a reader without a shuffle has them
    centred = blocks - blocks.mean(axis=1, keepdims=True)
    assert ((centred[:, 1:] * centred[:, :-1]).sum(1) / (rows - 1) / centred.var(axis=1)).mean() > 0.7
