"""Settings under the names by which scripts ask an Accelerator for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain._engine.assemble import Parts
    from drivetrain.checkpoint.project import ProjectConfiguration
    from drivetrain.data.config import DataLoaderConfiguration

__all__ = ["SettingsFacade"]


class SettingsFacade:
    """What was decided about precision, loaders, trackers and saving."""

    dataloader_config: DataLoaderConfiguration
    project_configuration: ProjectConfiguration
    _parts: Parts

    @property
    def mixed_precision(self) -> str:
        """Name of the precision; "no" for full precision."""
        precision = self._parts.plan.precision
        return "no" if "no" in precision.aliases else precision.name

    @property
    def native_amp(self) -> bool:
        """Whether a mixed precision is on."""
        return self.mixed_precision != "no"

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch is split over processes."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether rank 0 reads for all; None: for iterable data sets only."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> Any:
        """Whether every process gets the same number of batches. A new value holds for loaders prepared from then on."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: Any) -> None:
        self.dataloader_config.even_batches = value

    @property
    def non_blocking(self) -> bool:
        """Whether moving batches to the device doesn't wait for the copy."""
        return self.dataloader_config.non_blocking

    @property
    def use_seedable_sampler(self) -> bool:
        """Always: the order of samples follows from seed and epoch."""
        return True

    @property
    def use_stateful_dataloader(self) -> bool:
        """Always: prepared loaders have ``state_dict`` and ``load_state_dict``."""
        return True

    @property
    def rng_types(self) -> list[str]:
        """Generators made equal on all processes when an epoch starts."""
        return list(self._parts.plan.settings.rng_types)

    @property
    def log_with(self) -> list[str]:
        """Names of the trackers that were asked for."""
        plan = self._parts.plan
        return [t.name for t in plan.trackers] + [str(getattr(t, "name", t)) for t in plan.tracker_objects]

    @property
    def multi_device(self) -> bool:
        """Whether there are several processes, each with an accelerator."""
        plan = self._parts.plan
        return plan.process.is_distributed and plan.device.torch_type != "cpu"

    @property
    def should_save_model(self) -> bool:
        """Whether this process is one that writes models."""
        control = self._parts.control
        return (
            control.is_local_main_process if self.project_configuration.save_on_each_node else control.is_main_process
        )
