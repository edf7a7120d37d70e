"""What microbial communities have in common and what can be told from them, learnt from sequences and their counts."""
