"""A connection to a Ray cluster: one that runs, or one of this machine alone."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from normscope.core.errors import InputError

ON_LOOPBACK = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # Ray's own switch for clusters of one machine


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """Ray, connected: to the cluster at `address`, or to one that is started here; one that was connected before stays so."""
    ray = imported(address is None)
    started = not ray.is_initialized()
    if started:
        connect(ray, address)
    try:
        yield ray
    finally:
        if started:
            ray.shutdown()


def imported(local: bool) -> Any:
    """Ray; local: for a cluster that no other machine can reach, which Ray must know when it is imported."""
    if local:
        os.environ.setdefault(*ON_LOOPBACK)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise InputError("a cluster needs Ray: pip install 'normscope[ray]'") from None
    return ray


def connect(ray: Any, address: str | None) -> None:
    try:
        _knock(address)  # Ray itself tries for minutes
        ray.init(address=address, log_to_driver=False, **({} if address else {"include_dashboard": False}))
    except (OSError, ValueError) as error:
        raise InputError(f"no Ray cluster at {address}: {str(error).splitlines()[0]}; start one with `ray start --head`") from error


def _knock(address: str | None) -> None:
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()
