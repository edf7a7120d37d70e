"""Reports: one HTML file of a run or a sweep, readable without a network."""
