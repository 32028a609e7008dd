"""Whether requirements are met, from the metadata of what is installed: nothing is imported for it."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterable

from drivetrain import __version__
from drivetrain._plugins.metadata import installed_version
from drivetrain._plugins.record import canonical

__all__ = ["Requirements"]

_PLAIN = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^\]]*\])?\s*\(?([^;@()]*)\)?\s*")
_CLAUSE = re.compile(r"\s*(>=|<)\s*(\d+(?:\.\d+)*)\s*")
_RELEASE = re.compile(r"(\d+(?:\.\d+)*)(?:\+[a-z0-9.]+)?")
_EXTRA = re.compile(r";\s*extra\s*==\s*[\"'][^\"']*[\"']\s*$")


class Requirements:
    """Checks requirements, looking up each distribution only once.

    Example:
        >>> Requirements().unmet(["drivetrain>=0.1", "no-such-thing>=2; python_version > '3'"])
        ["needs no-such-thing>=2, which isn't installed"]
    """

    def __init__(self) -> None:
        # The running core is what it is, whatever an installed distribution of that name says.
        self._versions: dict[str, str | None] = {"drivetrain": __version__}

    def unmet(self, requirements: Iterable[str]) -> list[str]:
        """Say what is missing.

        Args:
            requirements: PEP 508 strings; those whose marker doesn't hold here (or belongs to an extra) don't count.

        Returns:
            One clause for each that isn't met.
        """
        problems = (self._problem(requirement) for requirement in requirements)
        return [problem for problem in problems if problem is not None]

    def _problem(self, text: str) -> str | None:
        parsed = _parse(text)
        if isinstance(parsed, str):
            return parsed
        if parsed is None:
            return None
        name, specifier = parsed
        version = self._version(name)
        wanted = f"{name}{specifier}"
        if version is None:
            return f"needs {wanted}, which isn't installed"
        if version and not _contains(specifier, version):
            return f"needs {wanted}, but {version} is installed"
        return None

    def _version(self, name: str) -> str | None:
        """The installed version; "" if a module is there but no metadata tells its version; None if there is neither."""
        key = canonical(name)
        if key not in self._versions:
            self._versions[key] = _installed_version(name)
        return self._versions[key]


def _parse(text: str) -> tuple[str, str] | str | None:
    """Name and versions of a requirement; None if its marker doesn't hold here; a clause if it can't be read."""
    if _EXTRA.search(text):
        return None
    # packaging's parser of whole requirements takes as long to import as all the rest of discovery, and most have no marker.
    plain = _PLAIN.fullmatch(text)
    if plain is not None:
        if _bounds(plain[2]) is None:
            from packaging.specifiers import InvalidSpecifier, SpecifierSet

            try:
                SpecifierSet(plain[2])
            except InvalidSpecifier:
                return f"has a requirement {text!r} that can't be read"
        return plain[1], plain[2].strip()
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        return f"has a requirement {text!r} that can't be read"
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return None
    return requirement.name, str(requirement.specifier)


def _contains(specifier: str, version: str) -> bool:
    bounds, release = _bounds(specifier), _RELEASE.fullmatch(version)
    if bounds is not None and release is not None:
        have = _numbers(release[1])
        return all(have >= _numbers(bound) if sign == ">=" else have < _numbers(bound) for sign, bound in bounds)
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion

    try:
        # A nightly build satisfies what its release would: without prereleases=True no development version does.
        return SpecifierSet(specifier).contains(version, prereleases=True)
    except InvalidVersion:
        return False


def _bounds(specifier: str) -> list[tuple[str, str]] | None:
    """The clauses, if all are of the common kind (``>=1.2,<2``), which is compared here; None if packaging, slow to import, must do it."""
    clauses = [_CLAUSE.fullmatch(clause) for clause in specifier.split(",")] if specifier.strip() else []
    bounds = [(clause[1], clause[2]) for clause in clauses if clause is not None]
    return bounds if len(bounds) == len(clauses) else None


def _numbers(release: str) -> list[int]:
    """The numbers of a version; zeros at its end mean nothing."""
    numbers = [int(number) for number in release.split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers


def _installed_version(name: str) -> str | None:
    module = name.replace("-", "_")
    running = getattr(sys.modules.get(module), "__version__", None)
    if isinstance(running, str):
        return str(running)  # torch's is a class of its own
    version = installed_version(name)
    if version is not None:
        return version
    # Vendors' containers carry a torch that was built in place, without metadata.
    try:
        spec = importlib.util.find_spec(module) if module.isidentifier() else None
    except ValueError:  # a module without a spec is there already, but nobody knows from where
        return None
    return "" if spec is not None and spec.origin is not None else None
