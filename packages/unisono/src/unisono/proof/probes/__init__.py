"""Small experiments on a task's own functions, on one process, before any layout is tried.

They change nothing: what they find is recorded, and tells faults apart that look alike in the numbers of a run. All
that they call is called with the same weights and rows, and random states are restored.
"""
