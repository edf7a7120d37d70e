"""Small recursive models that solve puzzles: Sudoku, mazes, ARC-AGI."""
