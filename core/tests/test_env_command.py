import json
import types

import pytest
import torch
from click.testing import CliRunner

from drivetrain._builtin.clusters import CLUSTERS
from drivetrain._builtin.devices import DEVICES
from drivetrain._engine.availability import detect_devices
from drivetrain.cli import main
from drivetrain.cli.env import describe_environment
from drivetrain.config.secrets import without_secrets


def run(*arguments, **environ):
    result = CliRunner().invoke(main, ["env", *arguments], env=environ)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_what_a_bug_report_needs_is_there():
    facts = json.loads(run("--json", RANK="0", WORLD_SIZE="1", PBS_JOBID="17", UNRELATED="x"))
    assert list(facts)[:6] == ["system", "packages", "plugins", "devices", "variables", "configuration file"]
    assert facts["packages"]["torch"] == torch.__version__ or facts["packages"]["torch"] in torch.__version__
    assert "gloo" in facts["packages"]["torch.distributed"]
    assert facts["plugins"]["builtin"].startswith("drivetrain ")
    assert facts["devices"]["cpu"]
    assert facts["system"]["memory"].endswith("available")
    assert facts["variables"]["WORLD_SIZE"] == "1"
    assert facts["variables"]["PBS_JOBID"] == "17"
    assert "UNRELATED" not in facts["variables"]
    assert facts["configuration file"] == {"path": "none"}


def test_text_has_the_same_facts():
    text = run()
    for section in ("system", "packages", "plugins", "devices", "variables", "configuration file"):
        assert section in text.splitlines()
    assert f"torch: {torch.__version__}" in text


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("DRIVETRAIN_API_KEY", "abc", "(left out)"),
        ("TORCH_TOKEN", "abc", "(left out)"),
        ("MY_SECRET_THING", "abc", "(left out)"),
        ("DB_PASSWORD", "abc", "(left out)"),
        ("PASSWD", "abc", "(left out)"),
        ("X_PWD", "abc", "(left out)"),
        ("X_AUTH", "abc", "(left out)"),
        ("AUTHOR", "me", "me"),
        ("PWD_LIKE", "abc", "(left out)"),
        ("PROXY", "http://me:pw@host:80/x", "http://(left out)@host:80/x"),
        ("PROXY", "http://token@host", "http://(left out)@host"),
        ("TRACKING", "https://host/?api_key=abc&page=2", "https://host/?api_key=(left out)&page=2"),
        ("TRACKING", "s3://b/o?X-Amz-Signature=abc;a=1", "s3://b/o?X-Amz-Signature=(left out);a=1"),
        ("MAIL", "me@host", "me@host"),
        ("TWO", "a://u:p@h b://v:q@i", "a://(left out)@h b://(left out)@i"),
    ],
)
def test_secrets_are_left_out(name, value, shown):
    assert without_secrets(name, value) == shown


def test_no_secret_of_the_environment_or_the_file_gets_through(tmp_path):
    path = tmp_path / "drivetrain.toml"
    path.write_text(
        'project_dir = "https://me:hunter2@host/x"\n[part]\napi-key = "hunter2"\nsize = 3\n'
        'nested = {password = "hunter2", list = [{token = "hunter2"}], plain = "seen"}\n'
    )
    environ = {
        "DRIVETRAIN_CONFIG_FILE": str(path),
        "DRIVETRAIN_X_TOKEN": "hunter2",
        "NCCL_SECRET": "hunter2",
        "TORCH_URL": "https://me:hunter2@host",
        "MASTER_ADDR": "node0",
    }
    facts = describe_environment(environ=environ, plugins=[], clusters=CLUSTERS, availability=detect_devices(DEVICES))
    text = json.dumps(facts)
    assert "hunter2" not in text
    assert facts["variables"]["MASTER_ADDR"] == "node0"
    assert facts["configuration file"]["part.size"] == "3"
    assert "seen" in facts["configuration file"]["part.nested"]


def test_a_broken_file_and_a_broken_plugin_are_facts(tmp_path):
    path = tmp_path / "drivetrain.toml"
    path.write_text("cpu = \n")
    record = types.SimpleNamespace(
        name="toy", distribution="toy-plugin", version="1.0", status="failed", reason="ImportError: no toys"
    )
    facts = describe_environment(
        environ={}, plugins=[record], clusters=CLUSTERS, availability=detect_devices(DEVICES), config_file=str(path)
    )
    assert "not valid TOML" in facts["configuration file"]["error"]
    assert facts["plugins"] == {"toy": "toy-plugin 1.0, failed: ImportError: no toys"}


def test_plugins_add_what_they_report():
    def prints_and_reports():
        print("a library's banner")
        return {"compiler": "g++ 12", "url": "https://me:pw@host"}

    def breaks():
        raise OSError("no such library")

    facts = describe_environment(
        environ={},
        plugins=[],
        clusters=CLUSTERS,
        availability=detect_devices(DEVICES),
        reports={"backend a": prints_and_reports, "backend b": breaks},
    )
    assert facts["backend a"] == {"compiler": "g++ 12", "url": "https://(left out)@host"}
    assert facts["backend b"] == {"error": "OSError: no such library"}
