import importlib.util
import pathlib

from drivetrain.testing.tracker import TrackerConformance
from drivetrain_neptune.plugin import SPEC

_spec = importlib.util.spec_from_file_location("neptune_reader", pathlib.Path(__file__).with_name("neptune_reader.py"))
neptune_reader = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(neptune_reader)


class TestNeptune(TrackerConformance):
    spec = SPEC

    def read_back(self, directory):
        return neptune_reader.read(directory)
