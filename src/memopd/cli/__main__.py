"""`python -m memopd.cli`: the command, also as torchrun starts it."""

import os
import sys

from memopd.cli import main

try:
    main()
except SystemExit as end:
    # A rank that has succeeded ends without the interpreter's shutdown: while that runs, a thread of gloo may free the
    # last tensor that it sent, which aborts the process (github.com/pytorch/pytorch/issues/190489).
    if not end.code and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    raise
