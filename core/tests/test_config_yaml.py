"""Configuration files in YAML: they say the same as those in TOML, with the same messages; and Accelerate's are taken over."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from drivetrain.cli import main
from drivetrain.config import read_config_file
from drivetrain.errors import ConfigurationError


@pytest.fixture
def config(tmp_path, monkeypatch):
    """``config(*arguments)`` in a directory of its own; its output and exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DRIVETRAIN_CONFIG_FILE", raising=False)

    def run(*arguments, code=0, command="config"):
        result = CliRunner().invoke(main, [command, *arguments])
        assert result.exit_code == code, result.output
        return result.output

    return run


TOML = """
mixed_precision = "no"
[core]
gradient-accumulation-steps = 4
log_with = ["jsonl"]
[grad-scaler]
init-scale = 1024
[other]
table = {a = 1.5, b = [true, "x"]}
"""
YAML = """
mixed_precision: no
core:
  gradient-accumulation-steps: 4
  log_with: [jsonl]
grad-scaler:
  init-scale: 1024
other:
  table: {a: 1.5, b: [true, "x"]}
"""


def test_both_formats_say_the_same(tmp_path):
    (tmp_path / "a.toml").write_text(TOML)
    (tmp_path / "a.yml").write_text(YAML)
    one, other = read_config_file(tmp_path / "a.toml"), read_config_file(tmp_path / "a.yml")
    assert (one.core, one.sections) == (other.core, other.sections)
    assert type(other.section("other")["table"]["a"]) is float
    assert other.where("init_scale", "grad-scaler") == f"{tmp_path / 'a.yml'}:7"
    assert one.where("init_scale", "grad-scaler") == f"{tmp_path / 'a.toml'}:7"


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("cpu: [\n", [":2", "not valid YAML"]),
        ("- a\n- b\n", [":1", "something else"]),
        ("cpu: true\ncpu: false\n", [":2", "duplicate key"]),
        ("debug: true\nmixed_precison: bf16\n", [":2", "'mixed_precison'", "Did you mean 'mixed_precision'?"]),
        ("core:\n\n  cpuu: true\n", [":3", "'cpuu'", "'cpu'"]),
        ("cpu: yes\n", [":1", "CoreSettings.cpu", "bool"]),
        ("core:\n  gradient_accumulation_steps: 0\n", [":2", ">= 1"]),
        ("cpu: true\ncore:\n  cpu: false\n", [":3", "set twice"]),
        ("part:\n  a-b: 1\n  a_b: 2\n", ["set twice in [part]"]),
        ("x: !!python/object/apply:os.system [id]\n", [":1", "'x'"]),
        ("cpu: true\n---\ncpu: false\n", ["not valid YAML"]),
    ],
)
def test_errors_name_file_line_and_key(tmp_path, text, fragments):
    path = tmp_path / "drivetrain.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        read_config_file(path)
    for fragment in [str(path), *fragments]:
        assert fragment in str(caught.value)


def test_an_empty_file_and_an_empty_section(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("")
    assert read_config_file(path).core == {}
    path.write_text("ddp:\n")
    assert read_config_file(path).sections == {"ddp": {}}


def test_the_wizard_writes_it_and_launch_takes_it(config, tmp_path):
    config(
        "--yes",
        "-o",
        "drivetrain.yaml",
        "--set",
        "mixed-precision=bf16",
        "--set",
        "launch.num_processes=2",
        "--set",
        "cpu=true",
    )
    assert (tmp_path / "drivetrain.yaml").read_text() == (
        "cpu: true\nmixed_precision: bf16\nlaunch:\n  num_machines: 1\n  num_processes: 2\n"
    ).replace("  num_machines: 1\n", "")
    (tmp_path / "train.py").touch()
    assert config("--dry-run", "train.py", command="launch").count(" WORLD_SIZE=2") == 2
    shown = config("show")
    assert "launch.num_processes" in shown and "drivetrain.yaml:4" in shown


def test_update_keeps_order_and_comments(config, tmp_path):
    path = tmp_path / "drivetrain.yaml"
    path.write_text("# mine\ncpu: true  # why\nddp:\n  bucket-cap-mb: 3  # small\n")
    config("update", "--set", "ddp.bucket_cap_mb=50", "--set", "debug=true", "--unset", "cpu")
    assert path.read_text() == "# mine\nddp:\n  bucket-cap-mb: 50.0 # small\ndebug: true\n"
    assert "has no cpu" in config("update", "--unset", "cpu", code=2)


def test_check_names_every_mistake_with_its_line(config, tmp_path):
    (tmp_path / "drivetrain.yaml").write_text("ddp:\n  bucket_cap: 3\n  dim: text\nmoon:\n  phase: 1\n")
    output = config("check", code=2)
    assert "drivetrain.yaml:2: [ddp] has no setting 'bucket_cap'. Did you mean 'bucket_cap_mb'?" in output
    assert "drivetrain.yaml:3" in output
    assert "drivetrain.yaml:4: no installed plugin has the section [moon]" in output


def test_two_files_that_would_count(config, tmp_path):
    (tmp_path / "drivetrain.toml").touch()
    (tmp_path / "drivetrain.yaml").touch()
    (tmp_path / "train.py").touch()
    for output in (config("show", code=2), config("--dry-run", "train.py", command="launch", code=2)):
        assert "drivetrain.toml and drivetrain.yaml are both here" in output


ACCELERATE = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_min_num_params: 1000
  fsdp_no_such_thing: 3
gpu_ids: all
machine_rank: 0
main_process_ip: 10.0.0.7
main_process_port: 29500
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 16
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
use_cpu: false
"""


def test_a_file_of_accelerate_is_known_and_converted(config, tmp_path):
    (tmp_path / "default_config.yaml").write_text(ACCELERATE)
    (tmp_path / "train.py").touch()
    output = config("--config-file", "default_config.yaml", "train.py", command="launch", code=2)
    assert "is a configuration file of Accelerate. `drivetrain config convert default_config.yaml`" in output
    output = config("convert", "default_config.yaml")
    assert "default_config.yaml:9: fsdp_config.fsdp_no_such_thing: 3 has no counterpart." in output
    file = read_config_file(tmp_path / "drivetrain.yaml")
    assert file.core == {"mixed_precision": "bf16", "backend": "fsdp", "cpu": False, "debug": False}
    assert file.section("fsdp") == {"sharding_strategy": "FULL_SHARD", "min_num_params": 1000}
    assert file.section("launch") == {
        "gpu_ids": "all",
        "machine_rank": 0,
        "main_process_ip": "10.0.0.7",
        "main_process_port": 29500,
        "num_machines": 2,
        "num_processes": 16,
    }
    assert config("check") == "drivetrain.yaml: fine\n"
    assert "there already" in config("convert", "default_config.yaml", code=2)
    (tmp_path / "other.yaml").write_text("cpu: true\n")
    assert "no configuration file of Accelerate" in config("convert", "other.yaml", "-o", "x.yaml", code=2)


def test_the_library_is_imported_for_yaml_alone(tmp_path):
    (tmp_path / "a.toml").write_text("cpu = true\n")
    code = (
        "import sys; from drivetrain.config import read_config_file; import drivetrain.cli.config\n"
        "read_config_file('a.toml'); print([m for m in sys.modules if 'ruamel' in m])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.stdout == "[]\n", result.stderr
