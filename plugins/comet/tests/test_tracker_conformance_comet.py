import importlib.util
import pathlib

import pytest

from drivetrain.testing.tracker import TrackerConformance
from drivetrain_comet.plugin import SPEC

_spec = importlib.util.spec_from_file_location("comet_reader", pathlib.Path(__file__).with_name("comet_reader.py"))
comet_reader = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(comet_reader)

QUIET = {
    "log_code": False,
    "log_graph": False,
    "log_git_metadata": False,
    "log_git_patch": False,
    "auto_output_logging": False,
    "log_env_details": False,
    "parse_args": False,
    "display_summary_level": 0,
}


class TestComet(TrackerConformance):
    spec = SPEC
    init_kwargs = {"mode": "offline", **QUIET}
    bin_width = 0.1

    @pytest.fixture(autouse=True)
    def _quiet(self, monkeypatch):
        monkeypatch.setenv("COMET_DISABLE_AUTO_LOGGING", "1")

    def read_back(self, directory):
        return comet_reader.read(directory)[0]
