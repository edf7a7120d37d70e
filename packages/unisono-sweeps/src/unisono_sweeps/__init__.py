"""Many runs: sweeps, search, their launchers, and what the runs show together."""
