"""What can be found wrong with a request before the cluster is asked."""

from __future__ import annotations

from collections.abc import Mapping

from drivetrain.errors import ConfigurationError
from drivetrain.interfaces import LaunchRequest
from drivetrain_kubernetes.options import KubernetesOptions

__all__ = ["checked"]

#: What a TrainJob can't say: its runtime does.
_OF_THE_RUNTIME = (
    "working_dir",
    "environment_from",
    "priority_class",
    "image_pull_policy",
    "scheduler",
    "restart_policy",
    "backoff_limit",
    "fail_on_exit_codes",
    "ttl",
)


def checked(request: LaunchRequest) -> KubernetesOptions:
    """The launcher's settings, if they go together and with the request.

    Raises:
        ConfigurationError: With what to do instead.

    Example:
        >>> checked(LaunchRequest(command=["train.py"], options={"image": "train:1"})).kind
        'job'
        >>> checked(LaunchRequest(command=["train.py"]))
        Traceback (most recent call last):
        ...
        drivetrain.errors.ConfigurationError: kubernetes.image is missing: which image has Python, Drivetrain and the script in it?
    """
    options = KubernetesOptions.from_mapping(request.options)
    options.validate()
    _check_request(request)
    given: Mapping[str, object] = options.explicit()
    if options.kind == "job":
        if options.image is None:
            raise ConfigurationError(
                "kubernetes.image is missing: which image has Python, Drivetrain and the script in it?"
            )
        wrong: list[str] = [name for name in ("runtime", "runtime_kind") if name in given]
        if wrong:
            raise ConfigurationError(
                f"kubernetes.{' and '.join(wrong)}: only a TrainJob has a runtime. Add --kubernetes-kind trainjob, or leave it out."
            )
    else:
        wrong = [name for name in _OF_THE_RUNTIME if name in given]
        if options.gang not in (None, "kueue"):
            wrong.append("gang")
        if wrong:
            raise ConfigurationError(
                f"kubernetes.{', '.join(wrong)}: a TrainJob can't say that, its runtime {options.runtime!r} does. Change the runtime, or use "
                "--kubernetes-kind job."
            )
    twice = sorted({text.partition("=")[0].strip() for text in options.environment_keys} & set(options.environment))
    if twice:
        raise ConfigurationError(
            f"{', '.join(twice)}: both kubernetes.environment and environment_keys say it. Leave one out."
        )
    _check_gang(options)
    if options.restart_policy == "OnFailure" and options.fail_on_exit_codes:
        raise ConfigurationError(
            'kubernetes.fail_on_exit_codes needs restart_policy="Never": containers that start again in place have no failure policy.'
        )
    return options


def _check_request(request: LaunchRequest) -> None:
    given = [
        name
        for name, value in (
            ("main_process_ip", request.main_process_ip),
            ("machine_rank", request.machine_rank or None),
            ("min_machines", request.min_machines),
        )
        if value is not None
    ]
    if given:
        raise ConfigurationError(
            f"{', '.join(given)}: under Kubernetes the pods find each other, and their number is fixed. Leave it out."
        )


def _check_gang(options: KubernetesOptions) -> None:
    if options.gang == "kueue" and not options.queue:
        raise ConfigurationError("kubernetes.gang='kueue' needs the name of a local queue: --kubernetes-queue NAME.")
    if options.queue and options.gang not in ("kueue", "volcano"):
        raise ConfigurationError(
            f"kubernetes.queue={options.queue!r}: queues are Kueue's or Volcano's. Add --kubernetes-gang kueue or volcano, or leave it out."
        )
