"""Small recursive models that solve puzzles: Sudoku, mazes, ARC-AGI."""

from unisono import Recipe

RECIPE = Recipe(
    tasks={"torch": "unisono.recipes.puzzles.task:Puzzles", "jax": "unisono.recipes.puzzles.jax_task:Puzzles"}
)
