"""What a model is asked besides its loss: benchmarks, prompts, sources one by one."""
