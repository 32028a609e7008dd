"""Conformance of backends: subclass `BackendConformance` in a test file, say which backend, and run pytest.

Functions run on live ranks (the fixture ``workers``), and numbers are compared with plain PyTorch on the whole batch::

    from toy.plugin import TOY


    class TestToy(BackendConformance):
        spec = TOY
        world_sizes = (1, 2)
        precisions = ("fp32", "bf16")

The plugin must be installed, so that the ranks find it. ``pytest -m "not full"`` runs a selection of trainings in which every two settings meet;
without it, the whole product runs.
"""

from __future__ import annotations

from drivetrain.testing._backend_contract import ContractTests
from drivetrain.testing._backend_models import ModelTests
from drivetrain.testing._backend_objects import ObjectTests
from drivetrain.testing._backend_state import StateTests
from drivetrain.testing._backend_windows import WindowTests

__all__ = ["BackendConformance"]


class BackendConformance(ModelTests, WindowTests, ContractTests, ObjectTests, StateTests):
    """What every backend must do: the promises of `drivetrain.interfaces.Backend`, at each world size and in each precision.

    What a backend doesn't declare (`drivetrain.specs.Capability`) isn't asked of it, but must be refused.

    Attributes:
        spec: The backend's descriptor.
        world_sizes: Numbers of ranks to test with.
        precisions: Names of precisions to test with; the first one is compared most strictly.
        arguments: Keyword arguments of every Accelerator, such as ``{"device": "toychip"}``.
        tolerance: Largest difference to plain PyTorch by precision, relative for values above 1.
        autocast: Dtype of ``torch.autocast`` in which plain PyTorch computes what a precision is compared with; precisions that
            aren't in it are compared with full precision.
        reads: Host reads of device values per window by precision: only a loss scale needs one. A backend that needs more says so here.
        bit_identical_up_to: Up to this world size, a resumed run must be bit-identical; above, equal within tolerance.

    Example:
        >>> from drivetrain.specs import BackendSpec
        >>> class TestToy(BackendConformance):
        ...     spec = BackendSpec(name="toy", target="toy.backend:ToyBackend")
        >>> sum(name.startswith("test_") for name in dir(TestToy)) > 20
        True
    """
