"""Which of ten kinds of sound is it? A recipe for the clips of ESC-10 (Piczak, 2015)."""

from unisono import Recipe

RECIPE = Recipe(
    tasks={"torch": "esc10.task:Esc10"},
    verbs={"listen": ("esc10.task:listen", "say what a sound file is, by a trained model")},
)
