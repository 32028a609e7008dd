"""Knowing soon that a server is down. MLflow itself tries for minutes, and its limits are environment variables of the whole process."""

from __future__ import annotations

import socket
import urllib.request
from urllib.parse import urlsplit

__all__ = ["check_server"]


def check_server(uri: str, timeout: float) -> None:
    """Connect to a server and hang up, if the address is one of HTTP and no proxy is between.

    Raises:
        ConnectionError: If it doesn't answer in time.

    Example:
        >>> check_server("sqlite:///here.db", 1.0)
    """
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return
    if parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(parts.hostname):
        return
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname, port), timeout).close()
    except OSError as error:
        raise ConnectionError(f"the MLflow server {parts.hostname}:{port} doesn't answer: {error}") from error
