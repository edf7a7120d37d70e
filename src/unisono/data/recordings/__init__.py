"""Audio recordings as sources: rows with audio and labels, from tables, folders or WebDataset archives."""

from unisono.data.recordings.source import Recordings, open_recordings
from unisono.data.recordings.windowed import WindowedRecordings, cut_windows

__all__ = ["Recordings", "WindowedRecordings", "cut_windows", "open_recordings"]
