"""Values as they may be shown: in bug reports, explanations and messages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["LEFT_OUT", "masked", "without_secrets"]

#: What stands in a secret's place.
LEFT_OUT = "(left out)"

_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|COOKIE|(^|_)(AUTH|PWD|PAT)($|_)", re.IGNORECASE)
_URL_USER = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*://)[^/\s@]+@", re.IGNORECASE)
_URL_SECRET = re.compile(
    r"(?P<name>[?&;][^=&;\s]*(?:token|key|secret|passw|sig|credential|auth)[^=&;\s]*=)[^&;\s]+", re.IGNORECASE
)


def without_secrets(name: str, value: str) -> str:
    """A text as it may be shown: nothing of what its name calls a secret, and URLs without credentials.

    Example:
        >>> without_secrets("MY_API_KEY", "abc"), without_secrets("PROXY", "http://me:pw@host:80/?token=x&b=1")
        ('(left out)', 'http://(left out)@host:80/?token=(left out)&b=1')
    """
    if _SECRET_NAME.search(name):
        return LEFT_OUT
    return _URL_SECRET.sub(rf"\g<name>{LEFT_OUT}", _URL_USER.sub(rf"\g<scheme>{LEFT_OUT}@", value))


def masked(value: Any, name: str = "") -> Any:
    """JSON-like data as it may be shown: texts without secrets. Numbers stay (``max_tokens``).

    Example:
        >>> masked({"api_key": "abc", "max_tokens": 5, "url": ["s3://me:pw@host"]})
        {'api_key': '(left out)', 'max_tokens': 5, 'url': ['s3://(left out)@host']}
    """
    if isinstance(value, str):
        return without_secrets(name, value)
    if isinstance(value, Mapping):
        return {key: masked(item, str(key)) for key, item in value.items()}
    return [masked(item, name) for item in value] if isinstance(value, list | tuple) else value
