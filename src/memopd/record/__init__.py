"""Rollouts to episodes: the store, and calls that other programs recorded."""

from memopd.record.importer import import_calls
from memopd.record.store import StoreError, read_episodes, write_episodes

__all__ = ["StoreError", "import_calls", "read_episodes", "write_episodes"]
