"""What a host must provide for a run, and which of its environment variables are harmful."""
