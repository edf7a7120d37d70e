"""What watches over a run: who it is, what its ranks are at, what it is asked for, what all ranks decide."""
