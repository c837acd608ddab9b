"""The wire formats: each translates its requests into `Ask` and `Said` into its answers, and does nothing else."""
