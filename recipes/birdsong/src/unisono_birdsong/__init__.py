"""Bird song and other sounds: encoders of spectrograms, trained with or without labels, in JAX."""

from unisono import Recipe

RECIPE = Recipe(
    tasks={"jax": "unisono_birdsong.task:Birdsong"},
    verbs={
        "probe": (
            "unisono_birdsong.evaluation.probe_verb:probe",
            "measure an encoder by probes of its embeddings",
        ),
        "export": ("unisono_birdsong.export:export", "write the encoder of a run, for use without a trainer"),
    },
)
