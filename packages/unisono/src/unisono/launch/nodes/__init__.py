"""How the nodes of a job connect and agree on the run."""
