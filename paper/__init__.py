"""The experiments of the paper at the scale of the embedded world, each one command."""
