"""`make test-trl` runs these tests in an environment that has TRL; elsewhere nothing here runs."""

from importlib.metadata import PackageNotFoundError, version

try:
    version("trl")
    collect_ignore = []
except PackageNotFoundError:
    collect_ignore = ["test_trl.py"]
