"""The torch engine: single process, DDP, FSDP2 and HSDP in one code path."""
