"""What the puzzle recipe is measured against."""
