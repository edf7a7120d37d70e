"""Speech by audio language models: text and a reference voice in, sound out."""

from unisono import Recipe

RECIPE = Recipe(
    tasks={"torch": "unisono.recipes.speech.task:Speech"},
    verbs={"generate": ("unisono.recipes.speech.generate:generate", "speak a text with a trained model (WAV file)")},
)
