"""The version, in a module of its own so that every folder may import it, installed or not."""

__version__ = "0.1.0"
