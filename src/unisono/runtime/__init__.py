"""The ground floor: who a process is, how processes talk, where randomness, files and errors come from."""
