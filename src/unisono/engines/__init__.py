"""Engines compute: one protocol, one package per framework."""
