"""How a script is started: with seeds, variables of launchers, and without a GPU."""
