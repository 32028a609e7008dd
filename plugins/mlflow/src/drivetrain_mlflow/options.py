"""Options of the MLflow tracker."""

from __future__ import annotations

from dataclasses import dataclass, field

from drivetrain.config import Options

__all__ = ["MlflowOptions"]


@dataclass
class MlflowOptions(Options):
    """What ``init_kwargs={"mlflow": {...}}``, the file's section ``[mlflow]`` and the variables ``DRIVETRAIN_MLFLOW_...`` set.

    Args:
        tracking_uri: A server (``http://...``) or database (``sqlite:///...``). Default: that of ``MLFLOW_TRACKING_URI``, or else a database in the
            logging directory.
        experiment_name: Default: the project's name.
        run_name: Name of the run as it is shown.
        tags: Tags of the run.
        description: A longer text about the run, its description.
        group: Id of the run that this one belongs to, as MLflow nests runs.
        artifact_location: Where a new experiment's artifacts go. Default: the server's choice, or a folder in the logging directory.
        connect_timeout: Seconds after which a server that doesn't answer counts as down.

    Example:
        >>> MlflowOptions(run_name="first").connect_timeout
        5.0
    """

    tracking_uri: str | None = None
    experiment_name: str | None = None
    run_name: str | None = None
    tags: dict[str, str] = field(default_factory=dict)
    description: str | None = None
    group: str | None = None
    artifact_location: str | None = None
    connect_timeout: float = 5.0
