"""What a model is asked besides its loss: benchmarks and prompts."""
