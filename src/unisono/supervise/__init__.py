"""Who watches a run from outside of it: the monitor of a node, what it concludes, and what it leaves behind."""
