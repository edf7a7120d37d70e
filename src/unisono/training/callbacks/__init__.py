"""What happens around the steps of a run, one behaviour per module."""
