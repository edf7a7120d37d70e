"""Next-token prediction with causal language models."""

from unisono import Recipe

RECIPE = Recipe(
    tasks={"torch": "unisono_language.task:Language"},
    open_folder="unisono_language.model_folder:open_folder",
    verbs={"generate": ("unisono_language.generate:generate", "continue a prompt with a trained model")},
)
