"""What a case of a proof leaves behind to be compared."""
