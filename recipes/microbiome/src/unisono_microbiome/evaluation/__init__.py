"""What a trained model says of samples, and how well."""
