"""What an encoder is worth: metrics of whole arrays, probes of frozen embeddings, and a file of results."""
