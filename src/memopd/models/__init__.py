"""Hugging Face models: how we load them, what we ask of them, and how our attention reaches their layers."""
