"""Recorded episodes: the store, and the import of calls that other programs recorded."""

from memopd.record.importers import import_calls, import_episodes
from memopd.record.store import StoreError, read_episodes, write_episodes

__all__ = ["StoreError", "import_calls", "import_episodes", "read_episodes", "write_episodes"]
