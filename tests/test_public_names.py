"""The names of the package: complete, loaded late, and free of side effects."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import emberbox

ROOT = Path(__file__).resolve().parents[1]


def test_all_names_exactly_what_can_be_had():
    assert set(emberbox.__all__) == {*emberbox._HOMES, "__version__"}
    assert len(emberbox.__all__) == len(set(emberbox.__all__))
    assert set(emberbox.__all__) <= set(dir(emberbox))


@pytest.mark.parametrize("name", emberbox.__all__)
def test_every_public_name_loads_and_keeps_its_name(name):
    value = getattr(emberbox, name)
    assert name == "__version__" or value.__name__ == name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = emberbox.nonsense


def test_the_version_is_the_projects():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert emberbox.__version__ == project["version"]


@pytest.mark.parametrize("module", ["emberbox", "emberbox.cli.main", "emberbox.settings"])
def test_importing_loads_nothing_heavy(module):
    code = f"import sys, {module}; print(*{{'torch', 'starlette', 'openai'}} & set(sys.modules))"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT / "src"
    )
    assert ran.stdout.strip() == ""


def test_the_server_imports_no_torch():
    code = "import sys, emberbox.server.app; print('torch' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT / "src"
    )
    assert ran.stdout.strip() == "False"
