"""Next-token prediction with causal language models."""

from unisono import Recipe

RECIPE = Recipe(
    tasks={"torch": "unisono.recipes.language.task:Language"},
    verbs={"generate": ("unisono.recipes.language.generate:generate", "continue a prompt with a trained model")},
)
