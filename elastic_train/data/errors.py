"""What can be wrong with data, said in one sentence."""

from __future__ import annotations


class DataError(Exception):
    """The data cannot be used as asked; ``str()`` is one sentence with the names and numbers."""
