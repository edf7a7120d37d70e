"""The rows that the ranks of a script have read, given to a run on one process."""
