"""Small recursive models that solve puzzles: Sudoku, mazes, ARC-AGI."""

from unisono import Recipe

RECIPE = Recipe(tasks={"torch": "unisono_puzzles.task:Puzzles", "jax": "unisono_puzzles.jax_task:Puzzles"})
