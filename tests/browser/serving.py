"""The dashboard of a directory, on a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from normscope.dashboard.server import listening, server


@contextmanager
def served(root: Path) -> Iterator[str]:
    """Its address, while it is served."""
    running = server(root)
    with listening("127.0.0.1", 0) as taken:
        thread = threading.Thread(target=running.run, kwargs={"sockets": [taken]}, daemon=True)
        thread.start()
        while not running.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{taken.getsockname()[1]}/"
        running.should_exit = True
        thread.join(10)
