"""An open checkpoint: its documents, and its tensors by what they belong to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from drivetrain.checkpoint.mirror import Mirror
from drivetrain.checkpoint.plain import decode, inline_tensor, loads
from drivetrain.checkpoint.store import TensorStore
from drivetrain.errors import CheckpointError
from drivetrain.interfaces.checkpoint_format import CheckpointFormat, TensorReader

__all__ = ["Source"]


class Source:
    """Reads a checkpoint; a context manager that closes its files.

    Args:
        files: The checkpoint's; closed with it.
        format: Reads its tensor files.
    """

    def __init__(self, files: Mirror, format: CheckpointFormat) -> None:
        self.directory = files.directory
        self.manifest = files.manifest
        self._mirror = files
        self._format = format
        self._files = contextlib.ExitStack()
        self._stores: dict[str, TensorStore] = {}
        self.state: dict[str, Any] = self.document("state")

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exc: object) -> None:
        self._files.close()
        self._mirror.close()

    def document(self, content: str) -> Any:
        """The JSON document with this content.

        Raises:
            CheckpointError: If there is none, or it is damaged.
        """
        names = self.manifest.holding(content)
        if len(names) != 1:
            raise CheckpointError(f"{self.directory} has {len(names)} files that hold {content!r}, not one")
        try:
            return loads(self._mirror.path(names[0]).read_bytes())
        except (OSError, CheckpointError) as error:
            raise CheckpointError(f"{self.directory / names[0]} can't be read: {error}") from error

    def store(self, content: str) -> TensorStore:
        """The tensors with this content, those that stand in the JSON included; empty if there are none."""
        if content not in self._stores:
            names = self.manifest.holding(f"tensors:{content}")
            readers = [self._files.enter_context(self._format.open(self._mirror.path(name))) for name in names]
            small = TensorReader({n: inline_tensor(t) for n, t in self._inline(content).items()}, {})
            self._stores[content] = TensorStore([*readers, small], self._aliases(content))
        return self._stores[content]

    def part(self, content: str) -> Any:
        """A part of the shared state, with its tensors."""
        return decode(*self.raw_part(content))

    def raw_part(self, content: str) -> tuple[Any, Callable[[str], torch.Tensor]]:
        """What `decode` needs for a part of the shared state."""
        store = self.store(f"{content}.extra" if content.partition("_")[0] == "model" else content)
        return self.state["parts"][content]["tree"], store.read

    def run_ids(self) -> dict[str, str]:
        """Ids of trackers' runs; reads no tensor."""
        tree = self.state["parts"]["objects"]["tree"]
        ids: dict[str, str] = decode(tree.get("tracker_run_ids", {}), str)
        return ids

    def own(self, rank: int) -> dict[str, Any]:
        """The state of one rank."""
        document = self.document(f"rank:{rank}")
        tree: dict[str, Any] = decode(document["tree"], self.store(f"rank:{rank}").read, document["inline"])
        return tree

    def _inline(self, content: str) -> dict[str, Any]:
        kind, _, extra = content.partition(".")
        if kind.partition("_")[0] == "model" and not extra:
            return {}
        small: dict[str, Any] = self.state["parts"].get(kind, {}).get("inline", {})
        return small

    def _aliases(self, content: str) -> dict[str, str]:
        kind, _, index = content.partition("_")
        if kind != "model" or not (index.isdigit() or not index):
            return {}
        aliases: dict[str, str] = self.state["models"][int(index or 0)]["aliases"]
        return aliases
