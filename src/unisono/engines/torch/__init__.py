"""The torch engine: single, DDP, FSDP2 and HSDP by one code path."""
