"""A run directory to tables, plots and one HTML page."""
