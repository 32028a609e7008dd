"""Whether an optional package or kind of device is there: ``is_<name>_available()``, for any name."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable, Mapping
from importlib import resources

__all__ = ["availability"]


def availability(function_name: str) -> Callable[[], bool]:
    """The function of the name ``is_<name>_available``.

    For a device type it says whether one can be used; for "bf16" and "fp16" whether the present device computes in it; for anything
    else whether the package can be imported. Nothing is imported to find out.

    Raises:
        AttributeError: If the name isn't of that form.

    Example:
        >>> availability("is_numpy_available")(), availability("is_no_such_package_available")()
        (True, False)
    """
    name = function_name.removeprefix("is_").removesuffix("_available")
    if function_name != f"is_{name}_available" or not name:
        raise AttributeError(function_name)

    def is_available(*args: object, **kwargs: object) -> bool:
        return _is_available(name)

    is_available.__name__ = is_available.__qualname__ = function_name
    is_available.__doc__ = f"Whether {name} can be used here."
    return is_available


@functools.cache
def _is_available(name: str) -> bool:
    from drivetrain._plugins import get_registry

    devices = get_registry().specs("device")
    if name in devices:
        from drivetrain._engine.availability import detect_devices

        return detect_devices([devices[name]]).status(name).available
    if name in ("bf16", "fp16"):
        import torch

        kind = torch.accelerator.current_accelerator(check_available=True)
        dtype = {"bf16": "bfloat16", "fp16": "float16"}[name]
        wanted = "cpu" if kind is None else kind.type
        return any(s.torch_type == wanted and dtype in s.dtypes for s in devices.values())
    return _can_import(_modules().get(name, name))


def _can_import(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


@functools.lru_cache(maxsize=1)
def _modules() -> Mapping[str, str]:
    """Packages whose module has another name than Accelerate's function."""
    text = resources.files("drivetrain.utils").joinpath("module_names.json").read_text(encoding="utf-8")
    found: dict[str, str] = json.loads(text)
    return found


def __getattr__(name: str) -> Callable[[], bool]:
    return availability(name)
