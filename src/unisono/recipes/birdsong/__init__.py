"""Bird song and other sounds: encoders of spectrograms, trained with or without labels, in JAX."""

from unisono import Recipe

RECIPE = Recipe(
    tasks={"jax": "unisono.recipes.birdsong.task:Birdsong"},
    verbs={
        "probe": (
            "unisono.recipes.birdsong.evaluation.probe_verb:probe",
            "measure an encoder by probes of its embeddings",
        ),
        "export": ("unisono.recipes.birdsong.export:export", "write the encoder of a run, for use without a trainer"),
    },
)
