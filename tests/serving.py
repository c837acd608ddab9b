"""A service on a free port of this machine, in a thread of this process."""

import socket
import threading
import time
from contextlib import contextmanager

from memopd import http


@contextmanager
def serving(app, protocol=http.Protocol):
    """Its address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = http.server(app, protocol, log_level="critical", timeout_graceful_shutdown=2)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
