"""Requirements of plugins: the common kind is compared without packaging, and as packaging would."""

import importlib.metadata
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet

from drivetrain._plugins import requirements
from drivetrain._plugins.requirements import Requirements

release = st.lists(st.integers(0, 12), min_size=1, max_size=4).map(lambda numbers: ".".join(map(str, numbers)))
version = st.tuples(release, st.sampled_from(["", "+cpu", "+cu126", ".dev1", "rc1", ".post2"])).map("".join)
clause = st.tuples(st.sampled_from([">=", "<", ">= ", "<=", "==", "!=", "~=", ">"]), release).map("".join)


@given(clauses=st.lists(clause, max_size=3), have=version)
def test_versions_are_compared_as_packaging_does(clauses: list[str], have: str) -> None:
    specifier = ",".join(c if not c.startswith("~=") or "." in c else f">={c[2:]}" for c in clauses)
    assert requirements._contains(specifier, have) == SpecifierSet(specifier).contains(have, prereleases=True)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("torch", None),
        ("torch >= 2.0", None),
        ("torch>=2.0,<99", None),
        ("torch>=99", "needs torch>=99, but {torch} is installed"),
        ("torch~=1.0", "needs torch~=1.0, but {torch} is installed"),
        ("torch>=2,banana", "has a requirement 'torch>=2,banana' that can't be read"),
        ("no-such-thing>=1", "needs no-such-thing>=1, which isn't installed"),
        ("no-such-thing>=1; python_version < '3'", None),
        ("torch>=99; python_version > '3'", "needs torch>=99, but {torch} is installed"),
    ],
)
def test_problem_is_said(text: str, problem: str | None) -> None:
    expected = [] if problem is None else [problem.format(torch=importlib.metadata.version("torch"))]
    assert Requirements().unmet([text]) == expected


def test_common_requirement_does_not_import_packaging() -> None:
    code = (
        "import sys; from drivetrain._plugins.requirements import Requirements; "
        "assert Requirements().unmet(['click>=8,<99']) == []; sys.exit('packaging' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
