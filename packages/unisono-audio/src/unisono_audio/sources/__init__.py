"""Audio recordings as sources: rows with audio and labels, from tables, folders or WebDataset archives."""

from unisono_audio.sources.source import Recordings, open_recordings
from unisono_audio.sources.windowed import WindowedRecordings, cut_windows

__all__ = ["Recordings", "WindowedRecordings", "cut_windows", "open_recordings"]
