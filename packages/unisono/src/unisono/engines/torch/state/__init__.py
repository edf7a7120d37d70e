"""What a run holds on its devices: parameters and the optimizer's state, sharded, saved and copied."""
