"""Small recursive models that solve puzzles: Sudoku, mazes, ARC-AGI; in torch and in JAX."""

from unisono import Recipe

RECIPE = Recipe(tasks={"torch": "unisono.recipes.puzzles.task:Puzzles"})
