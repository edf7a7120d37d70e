"""What watches over a run: who it is, what it is asked for, what all ranks decide together."""
