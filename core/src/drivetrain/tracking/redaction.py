"""Secrets in what is logged: passwords in URLs, tokens, keys, and values of environment variables that hold such.

Everything that becomes a text goes through here: hyperparameters, texts, texts in rows and tables, and error messages in the log.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from drivetrain._plugins.known import known_plugins
from drivetrain.config.secrets import LEFT_OUT, without_secrets

__all__ = ["Redactor", "is_secret_name"]

#: The last word of a name that holds a secret.
_SECRETS = frozenset(
    [
        "password",
        "passwd",
        "passphrase",
        "pwd",
        "secret",
        "secrets",
        "credential",
        "credentials",
        "cookie",
        "apikey",
        "authorization",
        "bearer",
        "pat",
    ]
)
#: Words before "key" or "token" that make it a secret.
_ACCESS = frozenset(
    [
        "api",
        "access",
        "auth",
        "authentication",
        "secret",
        "private",
        "account",
        "client",
        "session",
        "bearer",
        "refresh",
        "id",
        "encryption",
        "signing",
        "ssh",
        "hub",
        "user",
        "login",
        "deploy",
        "hf",
        "huggingface",
        "github",
        "gitlab",
        "openai",
        "anthropic",
        "aws",
        "azure",
        "gcp",
        "google",
        "slack",
    ]
)
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
#: Tokens whose form gives them away.
_TOKENS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[A-Za-z0-9_-]{20,}|xox[abprs]-[\w-]{10,}"
    r"|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)|(?<=[Bb]earer )[\w.~+/-]{8,}=*"
)
_HINT = re.compile(r"://|_|-|earer|AKIA|AIza|eyJ")
#: Shorter values of variables are words that occur by chance.
_SHORTEST = 8


def is_secret_name(name: str) -> bool:
    """Whether a hyperparameter of that name is a secret, as ``hub_token`` is and ``pad_token``, ``num_keys`` and ``tokenizer`` are not.

    Example:
        >>> [n for n in ("api_key", "hubToken", "token", "pad_token", "sort_key", "tokenizer", "db/password") if is_secret_name(n)]
        ['api_key', 'hubToken', 'token', 'db/password']
    """
    words = [w.lower() for w in _WORDS.findall(name.rpartition("/")[2])]
    if not words:
        return False
    if words[-1] in _SECRETS:
        return True
    if words[-1] in ("key", "token"):
        return words == ["token"] or (len(words) > 1 and (words[-2] in _ACCESS or words[-2] in known_plugins()))
    return False


class Redactor:
    """Leaves secrets out of texts.

    Args:
        environ: The environment: values of variables whose names speak of secrets are left out wherever they occur.

    Example:
        >>> redactor = Redactor({"MY_API_TOKEN": "abcdefgh12"})
        >>> redactor.text("get https://me:pw@host/x with abcdefgh12")
        'get https://(left out)@host/x with (left out)'
        >>> redactor.setting("api_key", "123"), redactor.setting("lr", 0.1)
        ('(left out)', 0.1)
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        values = {
            v
            for k, v in (os.environ if environ is None else environ).items()
            if len(v) >= _SHORTEST and not v.startswith("/") and without_secrets(k, "") == LEFT_OUT
        }
        self._known = re.compile("|".join(map(re.escape, sorted(values, key=len, reverse=True)))) if values else None

    def text(self, text: str) -> str:
        """The text without secrets."""
        if self._known is not None:
            text = self._known.sub(LEFT_OUT, text)
        if not _HINT.search(text):
            return text
        return _TOKENS.sub(LEFT_OUT, without_secrets("", text) if "://" in text else text)

    def setting(self, name: str, value: object) -> object:
        """A named value without secrets; numbers stay (``max_tokens``)."""
        if not isinstance(value, str):
            return value
        return LEFT_OUT if value and is_secret_name(name) else self.text(value)
