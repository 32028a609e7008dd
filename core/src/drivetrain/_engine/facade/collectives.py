"""Collectives on nested structures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.parallel import collectives, object_collectives, shape_collectives

if TYPE_CHECKING:
    from drivetrain._engine.stopping import Stopper
    from drivetrain.data.stack import LoaderStack
    from drivetrain.interfaces import Backend
    from drivetrain.parallel.process import Trigger

__all__ = ["CollectiveFacade"]


class CollectiveFacade:
    """Gather, reduce, broadcast, pad; metrics that count each sample once; a flag that all processes see."""

    backend: Backend
    _met: Any  # the tracking part's
    _debug: bool
    _trigger: Trigger
    _stopper: Stopper
    _loader_stack: LoaderStack

    def gather(self, tensor: Any) -> Any:
        """Concatenate each tensor of a structure over the processes that hold different rows, along dimension 0, on every process.

        Those are all processes, but for ones that share the same rows (tensor and context parallel): they count once.

        Args:
            tensor: A tensor, or any structure of them. 0-d tensors are gathered as 1-d. Shapes must agree in all but dimension 0; with
                ``debug=True`` in that as well.

        Returns:
            The same structure. What isn't a tensor stays this process's own.

        Example:
            >>> import torch
            >>> from drivetrain import Accelerator
            >>> Accelerator(cpu=True).gather({"n": torch.tensor([1, 2]), "name": "x"})
            {'n': tensor([1, 2]), 'name': 'x'}
        """
        group = self.backend.data_group
        gathered = collectives.gather(tensor, group=group, debug=self._debug)
        if group is None:
            self._met(2)
        return gathered

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather, each sample of the loader being iterated exactly once: rows that were repeated to fill the last batch are dropped.

        Args:
            input_data: A structure of tensors whose dimension 0 is the batch's rows; or, with no tensor in it, a list of objects.
            use_gather_object: Gather objects in any case.

        Returns:
            The structure with all processes' rows, by rank.

        Example:
            >>> import torch
            >>> from drivetrain import Accelerator
            >>> Accelerator(cpu=True).gather_for_metrics((torch.tensor([1, 0]), torch.tensor([1, 1])))
            (tensor([1, 0]), tensor([1, 1]))
        """
        from drivetrain.data.metrics import gather_for_metrics

        return gather_for_metrics(
            input_data, self._loader_stack.active, use_gather_object=use_gather_object, group=self.backend.data_group
        )

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce each tensor of a structure over the processes that hold different data, on every process.

        Those are all processes, but for ones that compute the same (tensor parallel): they count once.

        Args:
            tensor: A structure of tensors of equal shapes on every process.
            reduction: "sum", "mean", "max" or "min".
            scale: Factor of the result.

        Example:
            >>> import torch
            >>> from drivetrain import Accelerator
            >>> Accelerator(cpu=True).reduce(torch.tensor([1.0, 2.0]), reduction="mean", scale=2.0)
            tensor([2., 4.])
        """
        group = self.backend.gradient_group
        reduced = collectives.reduce(tensor, reduction=reduction, scale=scale, group=group)
        if group is None:
            self._met(2)
        return reduced

    def broadcast(self, tensor: Any, from_process: int = 0) -> Any:
        """Give every process one process's tensors, in any structure of equal shapes."""
        return collectives.broadcast(tensor, from_process=from_process)

    def broadcast_object_list(self, object_list: list[Any], from_process: int = 0) -> list[Any]:
        """Give every process one process's objects, in place. They travel pickled: trust the job's own processes only."""
        result: list[Any] = object_collectives.broadcast_object_list(object_list, from_process=from_process)
        return result

    def gather_object(self, object: Any) -> Any:
        """Concatenate each process's list of objects. They travel pickled: trust the job's own processes only."""
        return object_collectives.gather_object(object)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad each tensor of a structure to the largest size that any process has in dimension ``dim``.

        Args:
            tensor: A structure of tensors.
            dim: Dimension to pad; tensors that have fewer stay as they are.
            pad_index: Value to pad with.
            pad_first: Pad at the front.
        """
        return shape_collectives.pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)

    def set_trigger(self) -> None:
        """Raise a flag that `check_trigger` shows to all processes, and ask training to stop (see ``should_stop``)."""
        self._trigger.set_trigger()
        self._stopper.request("trigger")

    def check_trigger(self) -> bool:
        """Whether any process raised the flag since the last check; lowers it. Collective.

        Example:
            >>> from drivetrain import Accelerator
            >>> accelerator = Accelerator(cpu=True)
            >>> accelerator.set_trigger()
            >>> accelerator.check_trigger(), accelerator.check_trigger()
            (True, False)
        """
        return self._trigger.check_trigger()
