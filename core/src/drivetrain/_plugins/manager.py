"""A typed facade over pluggy: the only file that touches hooks.

Register hooks are called for one plugin at a time, so that each spec is attributed to its plugin and one that raises stops no other.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from importlib import import_module
from types import ModuleType, TracebackType
from typing import Any

import pluggy

from drivetrain._plugins.record import KINDS, register_hook
from drivetrain._plugins.validate import nearest_clause, spec_problem
from drivetrain.errors import PluginError
from drivetrain.hookspecs import PROJECT, SPEC_MODULES
from drivetrain.specs import AnySpec, Detection, Request

__all__ = ["HookManager"]

_DETECT = "drivetrain_detect_backend"
_PREFIXES = tuple(f"{PROJECT}_{verb}_" for verb in ("register", "detect", "before", "after"))


class HookManager:
    """Knows all hookspecs, and the plugins that were registered.

    Example:
        >>> manager = HookManager()
        >>> "drivetrain_register_trackers" in manager.hooks
        True
        >>> manager.listeners("drivetrain_before_save")
        ()
    """

    def __init__(self) -> None:
        self._pm = pluggy.PluginManager(PROJECT)
        for module in SPEC_MODULES:
            self._pm.add_hookspecs(import_module(f"drivetrain.hookspecs.{module}"))
        names = sorted(name for name in vars(self._pm.hook) if name.startswith(f"{PROJECT}_"))
        #: Names of all hooks.
        self.hooks = tuple(names)
        #: Names of the hooks that announce an event.
        self.events = frozenset(n for n in names if n.startswith((f"{PROJECT}_before_", f"{PROJECT}_after_")))

    def register(self, name: str, module: ModuleType) -> None:
        """Add a plugin's hook implementations.

        Raises:
            PluginError: If it doesn't keep to the hookspecs; then nothing of it is registered.
        """
        present = self._pm.get_name(module)
        if present is not None:
            raise PluginError(f"its module {module.__name__} is plugin {present!r} already")
        problem = self._implementation_problem(module)
        if problem is not None:
            raise PluginError(problem)
        try:
            self._pm.register(module, name=name)
        except (pluggy.PluginValidationError, ValueError) as error:
            self.unregister(name)
            raise PluginError(" ".join(str(error).split())) from error

    def unregister(self, name: str) -> None:
        """Forget a plugin; unknown names are fine."""
        if self._pm.has_plugin(name):
            self._pm.unregister(name=name)

    def collect(self, module: ModuleType) -> tuple[AnySpec, ...]:
        """Call all register hooks of one plugin.

        Returns:
            Its specs by kind, then in the order given.

        Raises:
            PluginError: For a result that isn't an iterable of the right specs, or a malformed spec.
            Exception: Whatever the plugin raises.
        """
        collected: list[AnySpec] = []
        for kind, cls in KINDS.items():
            hook = register_hook(kind)
            names = set()
            for spec in self._call_register_hook(hook, module, cls):
                problem = spec_problem(spec)
                if problem is not None:
                    raise PluginError(f"{hook} offers a malformed spec: {problem}")
                if spec.name in names:
                    raise PluginError(f"{hook} offers the {kind} {spec.name!r} twice")
                names.add(spec.name)
                collected.append(spec)
        return tuple(collected)

    def detect_backends(self, request: Request) -> Iterator[tuple[str, list[Detection] | Exception]]:
        """Ask each plugin which of its backends apply.

        Yields:
            The plugin's name and its detections, or what it raised; sorted by the plugin's name.
        """
        plugins = {impl.plugin_name: impl.plugin for impl in self._implementations(_DETECT)}
        for name, plugin in sorted(plugins.items()):
            try:
                answers = self._subset(_DETECT, plugin)(request=request)
                yield name, [_checked_detection(d) for answer in answers for d in _iterate(_DETECT, answer)]
            except Exception as error:  # reported by the registry, which knows the plugin's distribution
                yield name, error

    def listeners(self, event: str) -> tuple[str, ...]:
        """Names of the plugins that implement a hook, sorted."""
        return tuple(sorted({impl.plugin_name for impl in self._implementations(event)}))

    def notify(self, event: str, arguments: dict[str, Any]) -> None:
        """Call an event hook on every plugin; exceptions pass through."""
        getattr(self._pm.hook, event)(**arguments)

    def culprit(self, event: str, traceback: TracebackType | None) -> str | None:
        """Name of the plugin whose implementation of a hook is in a traceback."""
        codes = {getattr(impl.function, "__code__", None): impl.plugin_name for impl in self._implementations(event)}
        while traceback is not None:
            if traceback.tb_frame.f_code in codes:
                return codes[traceback.tb_frame.f_code]
            traceback = traceback.tb_next
        return None

    def _implementations(self, hook: str) -> list[pluggy.HookImpl]:
        return list(getattr(self._pm.hook, hook).get_hookimpls())

    def _subset(self, hook: str, plugin: object) -> pluggy.HookCaller:
        others = [other for other in self._pm.get_plugins() if other is not plugin]
        return self._pm.subset_hook_caller(hook, remove_plugins=others)

    def _call_register_hook(self, hook: str, module: ModuleType, cls: type[AnySpec]) -> Iterator[AnySpec]:
        expected = sum(impl.plugin is module for impl in self._implementations(hook))
        if not expected:
            return
        results = self._subset(hook, module)()
        if len(results) < expected:  # pluggy drops None
            raise PluginError(f"{hook} returned None; return a list, empty if there is nothing to offer")
        for result in results:
            for spec in _iterate(hook, result):
                if not isinstance(spec, cls):
                    raise PluginError(f"{hook} must return {cls.__name__} objects, got {spec!r}")
                yield spec

    def _implementation_problem(self, module: ModuleType) -> str | None:
        for attribute, value in sorted(vars(module).items()):
            options = self._pm.parse_hookimpl_opts(module, attribute) if callable(value) else None
            if options is not None:
                hook = options.get("specname") or attribute
                if hook in self.hooks:
                    problem = self._signature_problem(hook, value, dict(options))
                elif options.get("optionalhook"):
                    problem = None
                else:
                    problem = f"there is no hook {hook!r}.{nearest_clause(hook, self.hooks)}"
            else:
                problem = self._unmarked_problem(module, attribute, value)
            if problem is not None:
                return problem
        return None

    def _unmarked_problem(self, module: ModuleType, attribute: str, value: object) -> str | None:
        """A function that looks like a hook but isn't marked would be ignored in silence."""
        if not attribute.startswith(_PREFIXES) or not inspect.isfunction(value) or value.__module__ != module.__name__:
            return None
        if attribute in self.hooks:
            return f"{attribute} isn't marked as a hook implementation: put @hookimpl of drivetrain.hookspecs above it"
        return f"there is no hook {attribute!r}.{nearest_clause(attribute, self.hooks)}"

    def _signature_problem(self, hook: str, function: Any, options: dict[str, Any]) -> str | None:
        wrapper = options.get("wrapper") or options.get("hookwrapper")
        if wrapper and hook not in self.events:
            return f"{hook} is called for each plugin by itself; a wrapper of it has nothing to wrap"
        known = getattr(self._pm.hook, hook).spec.argnames
        for parameter in inspect.signature(function).parameters.values():
            # pluggy 1.6 never passes an argument that has a default, 1.7 does: such a plugin would depend on pluggy's version.
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.POSITIONAL_ONLY):
                return f"{hook} must name its arguments plainly, without '*' and '**', but has {str(parameter)!r}"
            if parameter.default is not parameter.empty:
                return f"the argument {parameter.name!r} of {hook} must have no default"
            if parameter.name not in known:
                takes = f"it may take {', '.join(known)}" if known else "it takes no argument"
                return f"{hook} has no argument {parameter.name!r}; {takes}"
        return None


def _iterate(hook: str, result: object) -> Iterable[Any]:
    if isinstance(result, str) or not isinstance(result, Iterable):
        raise PluginError(f"{hook} must return an iterable, got {result!r}")
    return result


def _checked_detection(detection: object) -> Detection:
    if not isinstance(detection, Detection):
        raise PluginError(f"{_DETECT} must return Detection objects, got {detection!r}")
    if not isinstance(detection.score, int):
        raise PluginError(f"{_DETECT}: the score of {detection.name!r} must be an int, got {detection.score!r}")
    return detection
