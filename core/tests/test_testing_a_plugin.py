"""The page on the kit, executed: its files become a distribution, and its tests are run as its authors would."""

import os
import re
import subprocess
import sys
from pathlib import Path

from drivetrain.testing.distributions import write_plugin

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAGE = (Path(__file__).parents[2] / "docs" / "testing-a-plugin.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r'```\w+ title="([^"]+)"\n(.*?)```', PAGE, re.DOTALL))


def test_the_pages_plugin_passes_the_pages_tests(tmp_path):
    project = tomllib.loads(FILES["pyproject.toml"])["project"]
    ((name, module),) = project["entry-points"]["drivetrain.plugins"].items()
    site = tmp_path / "site"
    site.mkdir()
    write_plugin(
        site,
        name,
        FILES[f"src/{module.replace('.', '/')}.py"],
        distribution=project["name"],
        version=project["version"],
        requires=project["dependencies"],
        module=module,
        files={f"{module.partition('.')[0]}/__init__.py": ""},
    )
    (tmp_path / "tests").mkdir()
    for path, text in FILES.items():
        if path.startswith("tests/"):
            (tmp_path / path).write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"^1[5-9] passed", done.stdout, re.MULTILINE), done.stdout


def test_the_table_names_every_kit():
    kits = {m[0]: m[1] for m in re.findall(r"\| `(\w+Conformance)` \| `([\w.]+)` \|", PAGE)}
    for name, module in kits.items():
        __import__(module)
        assert name in sys.modules[module].__all__
    folder = Path(sys.modules["drivetrain.testing.backend"].__file__).parent
    found = {
        m
        for f in folder.glob("[!_]*.py")
        for m in re.findall(r"^class (\w+Conformance)\b", f.read_text(), re.MULTILINE)
    }
    assert found == set(kits)
