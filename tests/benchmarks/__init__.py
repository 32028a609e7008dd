"""Benchmarks: Drivetrain against a hand-written loop, Hugging Face Accelerate and Lightning Fabric.

Run ``nox -s bench``, or ``python -m tests.benchmarks`` from the root in an environment with the packages of
``tests/benchmarks/requirements.txt``. Only ratios measured in one interleaved run are compared with the targets.
"""

# The peers of the steps benchmark, in the table's order, and what each must be able to import.
MODULES = {"hand": "torch", "accelerate": "accelerate", "fabric": "lightning_fabric", "drivetrain": "drivetrain"}
