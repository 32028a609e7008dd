import pytest

from drivetrain.config import ConfigFile, CoreSettings, read_config_file
from drivetrain.errors import ConfigurationError


@pytest.fixture
def write(tmp_path):
    def write(text, name="drivetrain.toml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_core_settings_stand_at_the_top_or_under_core_and_specs_in_sections(write):
    file = read_config_file(
        write(
            """
            mixed_precision = "bf16"
            [core]
            gradient-accumulation-steps = 4
            log_with = "jsonl"
            rng-types = ["torch", "cuda"]
            [grad-scaler]
            init-scale = 1024
            [other]
            table = {a = 1}
            """
        )
    )
    assert file.core == {
        "mixed_precision": "bf16",
        "gradient_accumulation_steps": 4,
        "log_with": ("jsonl",),
        "rng_types": ("torch", "cuda"),
    }
    assert file.section("grad_scaler") == file.section("grad-scaler") == {"init_scale": 1024}
    assert file.section("other") == {"table": {"a": 1}}
    assert file.section("absent") == {}


def test_lines_are_found(write):
    path = write('cpu = true\n\n[core]\n"debug" = true\n[my-part]  # comment\nsize = 3\na.b = 1\n')
    file = read_config_file(path)
    assert file.where("cpu") == f"{path}:1"
    assert file.where("debug", "core") == f"{path}:4"
    assert file.where("size", "my-part") == f"{path}:6"
    assert file.where("a", "my_part") == f"{path}:7"
    assert file.where("", "my-part") == f"{path}:5"
    assert file.where("elsewhere") == str(path)


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("cpu = \n", ["not valid TOML", "line 1"]),
        ('mixed_precison = "bf16"', [":1", "unknown setting 'mixed_precison'", "Did you mean 'mixed_precision'?"]),
        ("[core]\n\ncpuu = true", [":3", "'cpuu'", "'cpu'"]),
        ("cpu = 1", [":1", "CoreSettings.cpu", "bool"]),
        ('gradient_accumulation_steps = "4"', [":1", "gradient_accumulation_steps", "int"]),
        ("gradient_accumulation_steps = 0", [":1", ">= 1"]),
        ("log_with = 3", ["log_with"]),
        ("cpu = true\n[core]\ncpu = false", ["set twice", ":3"]),
        ("debug = true\n'debug' = true", ["not valid TOML"]),
        ('config_file = "other.toml"', ["can't name another"]),
        ("[a-b]\n[a_b]\n", ["stands there twice"]),
        ("[part]\na-b = 1\na_b = 2", ["set twice in [part]"]),
        (b"\xff\xfe", ["not UTF-8"]),
    ],
)
def test_errors_name_file_line_and_key(write, text, fragments):
    path = write(text)
    with pytest.raises(ConfigurationError) as caught:
        read_config_file(path)
    for fragment in [str(path), *fragments]:
        assert fragment in str(caught.value)


def test_a_missing_file_says_who_named_it(tmp_path):
    with pytest.raises(ConfigurationError, match=r"absent.toml \(DRIVETRAIN_CONFIG_FILE\) can't be read: No such file"):
        read_config_file(tmp_path / "absent.toml", said_by="DRIVETRAIN_CONFIG_FILE")
    with pytest.raises(ConfigurationError, match=r"config_file.*Is a directory"):
        read_config_file(tmp_path)


def test_files_of_other_formats_are_refused_by_name(write):
    with pytest.raises(ConfigurationError, match="are TOML or YAML"):
        read_config_file(write("{}", "default_config.json"))


def test_unknown_sections_are_sentences(write):
    path = write("[graph_scaler]\na = 1\n[grad_scaler]\n")
    (sentence,) = read_config_file(path).unknown_sections(["grad-scaler", "autocast"])
    assert f"{path}:1" in sentence
    assert "[graph_scaler]" in sentence
    assert "grad_scaler" in sentence


def test_no_file():
    assert ConfigFile().section("x") == {}
    assert ConfigFile().core == {}
    assert ConfigFile().unknown_sections([]) == ()


def test_every_core_setting_can_stand_in_a_file(write):
    settings = {
        "backend": '"single"',
        "device": '"cpu"',
        "cpu": "true",
        "mixed_precision": '"no"',
        "gradient_accumulation_steps": "2",
        "log_with": '["jsonl"]',
        "project_dir": '"runs"',
        "logging_dir": '"logs"',
        "dynamo_backend": '"INDUCTOR"',
        "step_scheduler_with_optimizer": "false",
        "step_scheduler_per_process": "true",
        "on_nonfinite": '"raise"',
        "resume": '"auto"',
        "rng_types": '["torch"]',
        "device_placement": "false",
        "debug": "true",
        "checkpoint_format": '"safetensors"',
    }
    assert set(settings) == set(CoreSettings.hints()) - {"config_file"}
    file = read_config_file(write("\n".join(f"{k} = {v}" for k, v in settings.items())))
    assert file.core.keys() == settings.keys()
    assert file.core["dynamo_backend"] == "inductor"
