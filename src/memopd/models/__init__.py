"""Hugging Face models: loading them, checking which ones we support, and connecting our attention to their layers."""
