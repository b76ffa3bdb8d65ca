"""The wheel and the sdist hold what is tracked, and an installed wheel works by itself."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.packaging.conftest import ROOT, environment

#: Folders that an installation has below the package.
_SOURCE_FOLDERS = ("backends/", "kernels/")


def _as_installed(name: str) -> str | None:
    """Where a tracked file lies in an installation; None for what stays outside."""
    if name.startswith(_SOURCE_FOLDERS) or name == "registry.yaml":
        return f"mla/{name}"
    return name if name.startswith("mla/") and not (ROOT / name).is_symlink() else None


def test_the_wheel_holds_exactly_the_tracked_package_files(distributions: Path, tracked: list[str]) -> None:
    (wheel,) = distributions.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = {installed for name in tracked if (installed := _as_installed(name))}
    assert held == wanted


def test_the_sdist_holds_every_package_file(distributions: Path, tracked: list[str]) -> None:
    (sdist,) = distributions.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    missing = {installed for name in tracked if (installed := _as_installed(name))} - held
    assert not missing


@pytest.fixture(scope="module", params=["wheel", "editable"])
def installed(
    request: pytest.FixtureRequest, distributions: Path, checkout: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The interpreter of a fresh environment with the package, which borrows this one's dependencies."""
    folder = tmp_path_factory.mktemp(request.param)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    site = Path(_run(python, "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # A path file adds the folders alone, not what path files in them add, such as an editable install of this package.
    lent = [path for path in sys.path if path.endswith("-packages")]
    (site / "borrowed.pth").write_text("\n".join(lent) + "\n")
    (wheel,) = distributions.glob("*.whl")
    what = [str(wheel)] if request.param == "wheel" else ["--no-build-isolation", "-e", str(checkout)]
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    done = subprocess.run([*command, *what], capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return python


def test_an_installation_works_by_itself(installed: Path) -> None:
    script = """
import json, pathlib, mla, mla._paths, mla.registry
import mla.backends.reference.runtime as runtime
sources = [source for one in mla.registry.default() for source in one.sources]
print(json.dumps({
    "file": mla.__file__, "entries": len(mla.registry.default()), "sources": all(map(pathlib.Path.is_file, sources)),
    "backend": runtime.__name__, "chosen": mla.explain("merge", target="cpu").chosen,
}))
"""
    told = json.loads(_run(installed, script))
    assert ROOT not in Path(told["file"]).parents
    assert told["entries"] > 0 and told["sources"]
    assert told["backend"] == "mla.backends.reference.runtime"
    assert told["chosen"] == "reference.cpu.merge.torch"


def test_nothing_but_the_package_is_importable(installed: Path) -> None:
    script = """
import importlib.util
print([name for name in ("backends", "kernels", "tests", "benchmarks", "docs") if importlib.util.find_spec(name)])
"""
    assert _run(installed, script).strip() == "[]"


def test_the_console_script_explains_hardware_that_is_not_here(installed: Path) -> None:
    command = [str(installed.parent / "mla"), "explain", "plan", "--target", "rocm:gfx942", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd="/", check=False)
    assert json.loads(done.stdout)["target"] == "rocm:gfx942", done.stderr


def _run(python: Path, script: str) -> str:
    command = [str(python), "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=python.parent, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
