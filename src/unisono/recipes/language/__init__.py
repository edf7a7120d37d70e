"""Next-token prediction with causal language models."""
