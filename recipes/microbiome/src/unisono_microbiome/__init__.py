"""Microbial communities: distances, diversity and targets of samples, from the sequences in them."""

from unisono import Recipe

RECIPE = Recipe(
    tasks={"torch": "unisono_microbiome.task:Microbiome"},
    verbs={
        "crossvalidate": (
            "unisono_microbiome.evaluation.crossvalidation:crossvalidate",
            "train a model per fold and score them all, beside forests",
        ),
        "predict": ("unisono_microbiome.evaluation.predict_verb:predict", "predict samples, as a table with intervals"),
        "look": ("unisono_microbiome.evaluation.plots:look", "plot a run and rank the taxa that matter to it"),
    },
)
