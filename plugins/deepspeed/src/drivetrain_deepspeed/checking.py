"""Whether DeepSpeed knows what a document says: asked of DeepSpeed itself, so that no list of its keys is kept here."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from drivetrain.config import nearest
from drivetrain.errors import ConfigurationError
from drivetrain_deepspeed.document import AUTO, MISSING, Path, name_of

__all__ = ["check_document", "section_model", "without_auto"]

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_COUNTS = (*_BATCH, "steps_per_print")


class Asked(dict[str, Any]):
    """A document that notes which keys it is asked for, and with which default: what isn't asked for is known to nobody."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        # Parameters of optimizers and schedulers belong to these, and are looked at where these are built.
        super().__init__({k: Asked(v) if isinstance(v, Mapping) and k != "params" else v for k, v in values.items()})
        self.defaults: dict[str, Any] = {}
        self.last = ""

    def _note(self, key: str, default: Any = MISSING) -> None:
        self.last = key
        if default is not MISSING or key not in self.defaults:
            self.defaults[key] = default

    def __copy__(self) -> Asked:
        return self  # notes have to end up here

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._note(str(key))
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        for key in list(super().__iter__()):
            self._note(key)
            yield key

    def get(self, key: str, default: Any = None) -> Any:
        self._note(key, default)
        return super().get(key, default)

    def keys(self) -> Any:
        return self

    def items(self) -> Any:
        return [(key, super(Asked, self).__getitem__(key)) for key in self]

    def plain(self) -> dict[str, Any]:
        """The keys and values, without noting anything."""
        return dict(dict.items(self))


def check_document(document: Mapping[str, Any], place: str) -> dict[Path, Any]:
    """Have DeepSpeed read a document, and look at what it asks for.

    Args:
        document: The document; "auto" counts as not said.
        place: Where it is written, for messages.

    Returns:
        DeepSpeed's defaults of the plain settings that it asked for, by path.

    Raises:
        ConfigurationError: For a key that DeepSpeed doesn't know, with the nearest one that it knows; for a value of a wrong type; for what
            it refuses or has replaced.
    """
    from deepspeed.runtime.config import DeepSpeedConfig
    from pydantic import ValidationError

    for key, value in document.items():
        if isinstance(value, bool) and key in ("zero_optimization", "bf16", "fp16"):
            raise ConfigurationError(f"{place}: {key} is a section, for example {_example(key)}, not {value!r}.")
    _check_deprecated(document, place)
    asked = Asked(without_auto({k: v for k, v in document.items() if k not in _BATCH}))
    dict.__setitem__(asked, "train_micro_batch_size_per_gpu", 1)
    asked.get("sequence_parallel_size")  # is asked for only where there are processes
    try:
        with _quiet():
            DeepSpeedConfig(asked)
    except ValidationError as error:
        raise ConfigurationError(f"{place}: {_explain(error, asked.last)}") from None
    except ImportError:
        raise
    except Exception as error:  # DeepSpeed asserts, and raises whatever its code runs into
        raise ConfigurationError(f"{place}: {asked.last}: {error}") from None
    _check_unknown(asked, (), place)
    _check_types(document, asked, place)
    return dict(_defaults(asked, ()))


def without_auto(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are said.

    Example:
        >>> without_auto({"a": "auto", "b": {"c": "auto", "d": 1}})
        {'b': {'d': 1}}
    """
    said = {k: v for k, v in values.items() if v != AUTO}
    return {k: without_auto(v) if isinstance(v, Mapping) else v for k, v in said.items()}


def section_model(section: str) -> Any:
    """DeepSpeed's pydantic model of a section; None where it has none.

    Example:
        >>> section_model("zero_optimization").__name__
        'DeepSpeedZeroConfig'
    """
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    return {"zero_optimization": DeepSpeedZeroConfig, "bf16": DeepSpeedBF16Config, "fp16": DeepSpeedFP16Config}.get(
        section
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """DeepSpeed tells on each rank how many processes there are; this reading is no engine."""
    from deepspeed.utils import logger

    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _example(key: str) -> str:
    return '{"stage": 2}' if key == "zero_optimization" else '{"enabled": true}'


def _defaults(asked: Asked, above: Path) -> Iterator[tuple[Path, Any]]:
    for key, default in asked.defaults.items():
        yield (*above, key), default
    for key, value in asked.plain().items():
        if isinstance(value, Asked):
            yield from _defaults(value, (*above, key))


def _check_unknown(asked: Asked, above: Path, place: str) -> None:
    for key, value in asked.plain().items():
        if key not in asked.defaults:
            where = f" in {name_of(above)}" if above else ""
            raise ConfigurationError(
                f"{place}: DeepSpeed has no setting {key!r}{where}, and would ignore it.{nearest(key, asked.defaults)}"
            )
        if isinstance(value, Asked) and value.defaults:  # else it is kept as it is, and read by somebody else
            _check_unknown(value, (*above, key), place)


def _check_types(document: Mapping[str, Any], asked: Asked, place: str) -> None:
    """DeepSpeed doesn't check its plain settings; its defaults say what they are."""
    for key, value in document.items():
        default = asked.defaults.get(key, MISSING)
        if value == AUTO or value is None:
            continue
        if key in _COUNTS:
            fits, wanted = _is_number(value) and int(value) == value and value > 0, "a whole number above 0"
        elif isinstance(default, bool):
            fits, wanted = isinstance(value, bool), "true or false"
        elif isinstance(default, int | float):
            fits, wanted = _is_number(value), "a number"
        elif isinstance(default, str):
            fits, wanted = isinstance(value, str), "a text"
        else:
            continue
        if not fits:
            raise ConfigurationError(f"{place}: {key}={value!r}: expected {wanted}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_deprecated(document: Mapping[str, Any], place: str) -> None:
    """Two spellings of a setting would be two values."""
    for section, values in document.items():
        model = section_model(section)
        for key in values if model is not None and isinstance(values, Mapping) else ():
            fields = model.model_fields
            extra = fields[key].json_schema_extra if key in fields else None
            if extra and extra.get("deprecated"):
                raise ConfigurationError(
                    f"{place}: {section}.{key} is an old spelling of {extra.get('new_param')}: write that one."
                )


def _explain(error: Any, section: str) -> str:
    """The first thing that a pydantic model of DeepSpeed found."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    name = name_of((section, *path))
    if first["type"] == "extra_forbidden":
        known = _known_fields(error.title, path[:-1])
        return f"DeepSpeed has no setting {path[-1]!r} in {name_of((section, *path[:-1]))}.{nearest(path[-1], known)}"
    message = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    value = first.get("input")
    shown = f"={value!r}" if path and not isinstance(value, Mapping) else ""
    return f"{name}{shown}: {message}."


def _known_fields(title: str, inside: Iterable[str]) -> list[str]:
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    model: Any = next(m for m in _subclasses(DeepSpeedConfigModel) if m.__name__ == title)
    for key in inside:
        by_name = {f.alias or name: f for name, f in model.model_fields.items()}
        inner = getattr(by_name[key].annotation, "__args__", (by_name[key].annotation,))
        model = next(m for m in inner if inspect.isclass(m) and issubclass(m, DeepSpeedConfigModel))
    return [f.alias or name for name, f in model.model_fields.items()]


def _subclasses(cls: Any) -> Iterator[Any]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)
