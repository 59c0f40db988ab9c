"""Durations as people read them."""

from __future__ import annotations


def format_duration(seconds: float) -> str:
    """Return "0:42", "12:34", "3:05:00" or "2d 03:00:00"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}:{minutes:02}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
