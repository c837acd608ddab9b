"""The experiments of the paper at the scale of the embedded world, with one command for each."""
