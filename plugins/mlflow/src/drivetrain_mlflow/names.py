"""Names and paths as MLflow takes them."""

from __future__ import annotations

from drivetrain.tracking.encoding import safe_name
from drivetrain.tracking.names import NameCoder

__all__ = ["TEXT", "artifact_path", "image_key", "make_coder", "project_legal"]

#: Texts of rows are tags of this name, a slash, the step, a slash and the value's name.
TEXT = "drivetrain.text"


def make_coder() -> NameCoder:
    """How names of metrics, parameters and tags are made legal: a tag of a row's text has a prefix besides."""
    return NameCoder(r"\w\-. :/", longest=200, paths=True)


def project_legal(name: str) -> str:
    """A legal name for an experiment."""
    return NameCoder(r" -~\xa0-\ud7ff\ue000-\U0010ffff", longest=400).legal(name)


def artifact_path(name: str) -> str:
    """A relative path for any name: no part of it leaves the run's folder or is refused by a server.

    Example:
        >>> artifact_path("models/../weights.bin")
        'models/_2E./weights.bin'
    """
    return "/".join(safe_name(part).replace("%", "_") for part in name.split("/") if part) or "_"


def image_key(coder: NameCoder, name: str) -> str:
    """A key for an image: letters, digits, ``_``, ``-``, ``.``, spaces and slashes alone."""
    return NameCoder(r"A-Za-z0-9_\-./ ", longest=150, paths=True).legal(coder.original(name))
