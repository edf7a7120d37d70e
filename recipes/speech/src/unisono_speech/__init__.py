"""Speech by audio language models: text and a reference voice in, sound out."""

from unisono import Recipe

RECIPE = Recipe(
    tasks={"torch": "unisono_speech.task:Speech"},
    verbs={"generate": ("unisono_speech.generate:generate", "speak a text with a trained model (WAV file)")},
)
