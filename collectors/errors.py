"""The error of settings that contradict each other."""

from __future__ import annotations


class ConfigError(ValueError):
    """Settings contradict each other, or there is no such environment; the message is one line."""
