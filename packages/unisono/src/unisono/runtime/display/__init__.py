"""What a person sees meanwhile: bars, tables, notebooks."""
