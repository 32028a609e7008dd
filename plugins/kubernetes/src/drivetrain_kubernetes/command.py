"""What each pod runs, and with which variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from drivetrain.config import read_config_file, variable
from drivetrain.config.secrets import masked, without_secrets
from drivetrain.config.settings import PREFIX
from drivetrain.errors import ConfigurationError
from drivetrain.interfaces import LaunchRequest
from drivetrain_kubernetes.cluster import DEFAULT_PORT
from drivetrain_kubernetes.options import KubernetesOptions

__all__ = ["CONFIG_FOLDER", "STOPPED", "config_file", "pod_command", "variables"]

#: Exit code of a pod whose ranks were told to save and end: it is replaced, and doesn't count as a failure. (EX_TEMPFAIL of sysexits.h.)
STOPPED = 75
#: Where the pods find the configuration file.
CONFIG_FOLDER = "/etc/drivetrain"
#: Seconds in which the name of pod 0 must become known: it does when that pod is scheduled.
_LOOKUP = 900
_PORT = DEFAULT_PORT
_CONFIG = variable("config_file")


def pod_command(request: LaunchRequest, options: KubernetesOptions, *, host: str) -> list[str]:
    """The program of each pod: ``drivetrain launch`` for its processes.

    Kubernetes itself puts in the pod's index.

    Args:
        request: What is to be started.
        options: The launcher's settings.
        host: Name of pod 0.

    Example:
        >>> words = pod_command(
        ...     LaunchRequest(command=["train.py", "$(HOME)"], num_processes=8, num_machines=2), KubernetesOptions(), host="a-0.a")
        >>> words[words.index("--machine-rank") + 1], words[-2:]
        ('$(JOB_COMPLETION_INDEX)', ['train.py', '$$(HOME)'])
    """
    words = [
        options.python,
        "-m",
        "drivetrain",
        "launch",
        "--on",
        "local",
        "--num-processes",
        str(request.num_processes),
    ]
    words += ["--num-machines", str(request.num_machines)]
    if request.num_machines > 1:
        port = str(request.main_process_port or _PORT)
        words += ["--machine-rank", "$(JOB_COMPLETION_INDEX)", "--main-process-ip", host, "--main-process-port", port]
        words += ["--lookup-timeout", str(_LOOKUP)]
    words += ["--max-restarts", str(request.max_restarts), "--stopped-exit-code", str(STOPPED)]
    # A little is left for what comes after the ranks.
    words += ["--shutdown-timeout", str(max(options.grace - 10, options.grace / 2))]
    if not request.label_output:
        words.append("--no-label")
    if request.log_directory is not None:
        words += ["--log-dir", str(request.log_directory)]
    words += ["-m"] if request.module else ["--no-python"] if request.plain else []
    return [*words, *(escaped(word) for word in request.command)]


def variables(
    request: LaunchRequest, options: KubernetesOptions, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The variables of each pod that aren't references: flags, settings in the present environment, and those asked for.

    Raises:
        ConfigurationError: For a value that is a secret by its name.

    Example:
        >>> variables(LaunchRequest(command=["a"], environment={"A": "$(B)"}), KubernetesOptions(), {"DRIVETRAIN_CPU": "1", "C": "2"})
        {'DRIVETRAIN_CPU': '1', 'A': '$$(B)'}
    """
    referenced = {text.partition("=")[0].strip() for text in options.environment_keys}
    of_launchers = tuple(variable("", section) for section in ("launch", "kubernetes"))
    shell = {
        name: value
        for name, value in environ.items()
        if name.startswith(PREFIX) and not name.startswith(of_launchers) and name != _CONFIG and value.strip()
    }
    flags = {name: value for name, value in request.environment.items() if name != _CONFIG}
    found = {name: escaped(value) for name, value in {**shell, **flags}.items() if name not in referenced}
    found |= options.environment
    for name, value in found.items():
        if is_secret(name, value):
            raise ConfigurationError(
                f"{name} is a secret by its name or looks like one, and would stand in the job for anybody to read. Put it into a Secret, and give "
                f"its place: --kubernetes-environment-keys {name}=secret/NAME/KEY."
            )
    if config_file(request) is not None:
        found[_CONFIG] = f"{CONFIG_FOLDER}/{Path(request.environment[_CONFIG]).name}"
    return found


def config_file(request: LaunchRequest) -> tuple[str, str] | None:
    """Name and text of the configuration file, which travels to the pods in a config map; None if there is none.

    Raises:
        ConfigurationError: If there are secrets in it.
    """
    path = request.environment.get(_CONFIG, "").strip()
    if not path:
        return None
    file = read_config_file(path)
    values = [("", key, value) for key, value in file.core.items()]
    values += [
        (s, key, value) for s, found in file.sections.items() if s != "kubernetes" for key, value in found.items()
    ]
    for section, key, value in values:
        if is_secret(key, value) if isinstance(value, str) else masked(value, key) != value:
            raise ConfigurationError(
                f"{file.where(key, section)}: {key} is a secret by its name or looks like one, and the file would travel to the pods for anybody to "
                f"read. Take it out, put it into a Secret, and give its place: --kubernetes-environment-keys "
                f"{variable(key, section)}=secret/NAME/KEY."
            )
    return Path(path).name, Path(path).read_text(encoding="utf-8")


def is_secret(name: str, value: str) -> bool:
    """Whether a variable's value must not be seen. Numbers and switches are none (TOKENIZERS_PARALLELISM).

    Example:
        >>> is_secret("HUB_TOKEN", "abc"), is_secret("MAX_TOKENS", "512"), is_secret("PROXY", "http://me:pw@host")
        (True, False, True)
    """
    if value.strip().lower() in ("", "true", "false", "none", "yes", "no") or value.strip().isdigit():
        return False
    return without_secrets(name, value) != value


def escaped(text: str) -> str:
    """A text in which Kubernetes replaces nothing.

    Example:
        >>> escaped("$(A) $HOME")
        '$$(A) $HOME'
    """
    return text.replace("$(", "$$(")
