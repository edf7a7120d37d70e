"""Recordings of speech with their texts, as samples."""
