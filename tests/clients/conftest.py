"""`make test-clients` names the folder of the clients' environments; without one nothing here runs."""

import os

collect_ignore = [] if os.environ.get("MEMOPD_CLIENTS") else ["test_clients.py"]
