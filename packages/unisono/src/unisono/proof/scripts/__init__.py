"""The proof for training scripts of other libraries."""
