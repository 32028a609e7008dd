"""Sizes of files, where Accelerate has them."""

from drivetrain._foreign import from_utils
from drivetrain.checkpoint.export import parse_size as convert_file_size_to_int

__all__ = ["convert_file_size_to_int"]

__getattr__ = from_utils
