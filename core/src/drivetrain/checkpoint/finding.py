"""Which checkpoint to load, the same on every rank: the one that was asked for, or the newest whole one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from drivetrain.checkpoint._agree import Agreement
from drivetrain.checkpoint.commit import recover, wait_until_visible
from drivetrain.checkpoint.location import Location
from drivetrain.checkpoint.manifest import MANIFEST, Manifest
from drivetrain.checkpoint.mirror import Mirror
from drivetrain.checkpoint.naming import checkpoint_name, list_checkpoints, usable_checkpoints
from drivetrain.checkpoint.verification import find_damage
from drivetrain.errors import CheckpointError

__all__ = ["Finder"]


class Finder:
    """Finds checkpoints and checks them; all methods are collective.

    Args:
        agreement: Of the ranks.
        visibility_timeout: Seconds until what one rank sees must be seen by the others.
    """

    def __init__(self, agreement: Agreement, *, visibility_timeout: float) -> None:
        self._agreement = agreement
        self._visibility_timeout = visibility_timeout

    def given(self, path: Location, *, verify: bool) -> Mirror:
        """This checkpoint.

        Raises:
            CheckpointError: On every rank, if there is none or it is broken.
        """

        def check() -> None:
            recover(path)
            if not (path / MANIFEST).exists() and (inside := list_checkpoints(path)):
                raise CheckpointError(f"{path} is no checkpoint, but holds some: load {inside[-1].path}, say")

        mirror = Mirror(path, self._manifest(path, check))
        damage = self._damage(mirror) if verify else []
        if damage:
            mirror.close()
            raise CheckpointError(f"{path} is broken and was not loaded: {'; '.join(damage[:4])}")
        return mirror

    def newest(self, folder: Location, *, verify: bool) -> Mirror | None:
        """The newest whole checkpoint of a folder, or None. Others are skipped with a warning."""
        with self._agreement.together("finding the newest checkpoint"):
            numbers = [found.number for found, _ in usable_checkpoints(folder)] if self._agreement.leads else None
        answers = [set(a) for a in self._agreement.exchange(numbers) if a is not None]
        for number in sorted(set.intersection(*answers), reverse=True):
            path = folder / checkpoint_name(number)
            mirror = Mirror(path, self._manifest(path))
            damage = self._damage(mirror) if verify else []
            if not damage:
                return mirror
            mirror.close()
            if self._agreement.leads:
                warnings.warn(f"Skipping {path}: {'; '.join(damage[:4])}", stacklevel=4)
        return None

    def _manifest(self, path: Location, check: Callable[[], None] = lambda: None) -> Manifest:
        """The manifest, the same on every rank that reads this directory.

        The leader looks first: what it doesn't find is an error at once, and what it finds the others wait for.
        """

        def read() -> Manifest:
            manifest = Manifest.read(path)
            manifest.check_files(path)
            return manifest

        def lead() -> list[Any]:
            check()
            manifest = read()
            return [manifest.run, manifest.created, manifest.size]

        rank = self._agreement.process.rank
        expected = self._agreement.lead(f"opening {path}", lead)
        with self._agreement.together(f"opening {path}"):
            if not self._agreement.leads:
                wait_until_visible(path / MANIFEST, self._visibility_timeout, rank)
            manifest = read()
            found = [manifest.run, manifest.created, manifest.size]
            if found != expected:
                raise CheckpointError(
                    f"{path} is another checkpoint on rank {rank} than on its first: {found}, {expected}"
                )
        return manifest

    def _damage(self, mirror: Mirror) -> list[str]:
        """What is wrong with the files' content; each rank reads its share."""
        members, files = self._agreement.members, mirror.manifest.files
        by_size = sorted(files, key=lambda name: (-files[name].size, name))
        share = by_size[members.index(self._agreement.process.rank) :: len(members)]
        found = self._agreement.exchange(list(find_damage(mirror, share)))
        return [clause for answer in found for clause in answer]
