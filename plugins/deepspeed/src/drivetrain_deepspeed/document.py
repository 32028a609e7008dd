"""The JSON that DeepSpeed is configured with, wherever it is written; and where in it each setting stands. Imports no torch."""

from __future__ import annotations

import base64
import binascii
import copy
import json
import os
from collections.abc import Mapping, MutableMapping
from typing import Any

from drivetrain.errors import ConfigurationError

__all__ = ["AUTO", "MISSING", "PATHS", "Path", "look", "name_of", "put", "read_document"]

#: What stands in a document where a value is to be found out.
AUTO = "auto"
#: What `look` returns where nothing stands.
MISSING: Any = type("Missing", (), {"__repr__": lambda _: "MISSING"})()

#: Keys from the document's top to a setting.
Path = tuple[str, ...]

_ZERO = "zero_optimization"
#: Where the settings of `DeepSpeedPlugin` stand in a document.
PATHS: Mapping[str, Path] = {
    "zero_stage": (_ZERO, "stage"),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("gradient_clipping",),
    "train_micro_batch_size_per_gpu": ("train_micro_batch_size_per_gpu",),
    "offload_optimizer_device": (_ZERO, "offload_optimizer", "device"),
    "offload_param_device": (_ZERO, "offload_param", "device"),
    "offload_optimizer_nvme_path": (_ZERO, "offload_optimizer", "nvme_path"),
    "offload_param_nvme_path": (_ZERO, "offload_param", "nvme_path"),
    "zero3_save_16bit_model": (_ZERO, "stage3_gather_16bit_weights_on_model_save"),
    "transformer_moe_cls_names": (_ZERO, "leaf_module", "classes"),
    "torch_autocast": ("torch_autocast", "enabled"),
}


def look(document: Mapping[str, Any], path: Path) -> Any:
    """What stands at a path; `MISSING` where nothing does.

    Example:
        >>> look({"zero_optimization": {"stage": 2}}, ("zero_optimization", "stage"))
        2
        >>> look({"zero_optimization": True}, ("zero_optimization", "stage"))
        MISSING
    """
    value: Any = document
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            return MISSING
        value = value[key]
    return value


def put(document: MutableMapping[str, Any], path: Path, value: Any) -> None:
    """Write a value at a path, with the sections that it needs.

    Example:
        >>> document = {}
        >>> put(document, ("bf16", "enabled"), True)
        >>> document
        {'bf16': {'enabled': True}}
    """
    for key in path[:-1]:
        section = document.get(key)
        if section is None:  # "offload_param": null is how some write that there is none
            section = document[key] = {}
        document = section
    document[path[-1]] = value


def name_of(path: Path) -> str:
    """A path as messages write it.

    Example:
        >>> name_of(("bf16", "enabled"))
        'bf16.enabled'
    """
    return ".".join(path)


def read_document(given: Any) -> tuple[dict[str, Any], str]:
    """Read a document as DeepSpeed takes it: a mapping, a path, JSON (with comments), or JSON in base64; or an object that holds one.

    Returns:
        A copy of it, and its name for messages.

    Raises:
        ConfigurationError: If there is no such file, or it isn't such a document, with the line; also for a key that stands there twice.

    Example:
        >>> read_document('{"bf16": {"enabled": true}}')
        ({'bf16': {'enabled': True}}, 'hf_ds_config')
    """
    name = "hf_ds_config"
    if not isinstance(given, str | os.PathLike):
        values = getattr(given, "config", given)
        if not isinstance(values, Mapping):
            raise ConfigurationError(
                f"hf_ds_config takes a path, a dict, JSON or JSON in base64, not a {type(given).__name__}."
            )
        return copy.deepcopy(dict(values)), name
    text = os.fspath(given).strip()
    if text.startswith("{"):
        return _parse(text, name), name
    if os.path.exists(text):  # noqa: PTH110
        return _parse(_read(text), text), text
    decoded = _decode(text)
    if decoded is None:
        raise ConfigurationError(
            f"hf_ds_config={text!r}: there is no such file, and it is neither JSON nor JSON in base64. (Paths are relative to {os.getcwd()}.)"  # noqa: PTH109
        )
    return _parse(decoded, name), name


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigurationError(f"hf_ds_config={path!r} can't be read: {reason}.") from None


def _decode(text: str) -> str | None:
    try:
        decoded = base64.b64decode(text, altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def _parse(text: str, name: str) -> dict[str, Any]:
    try:
        values = json.loads(text, object_pairs_hook=_unique(name))
    except json.JSONDecodeError as error:
        values = _parse_lenient(text, name, str(error))
    if not isinstance(values, dict):
        raise ConfigurationError(f"{name}: a DeepSpeed configuration is a JSON object, not a {type(values).__name__}.")
    return values


def _parse_lenient(text: str, name: str, problem: str) -> Any:
    """JSON with comments and trailing commas, which DeepSpeed takes, too."""
    try:
        import hjson  # of DeepSpeed's own requirements

        return hjson.loads(text, object_pairs_hook=_unique(name))
    except (ImportError, ValueError):
        raise ConfigurationError(f"{name} is not JSON: {problem}.") from None


def _unique(name: str) -> Any:
    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in found]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise ConfigurationError(f"{name}: {twice!r} stands there twice. Keep one of them.")
        return dict(found)

    return pairs
