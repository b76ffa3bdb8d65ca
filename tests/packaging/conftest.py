"""A clean copy of the tracked files, and the distributions that are built from it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def tracked() -> list[str]:
    """Paths of the tracked files that exist, relative to the root."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: there is no list of tracked files")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and os.path.lexists(ROOT / name)]


@pytest.fixture(scope="session")
def checkout(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tracked files and nothing else, symbolic links kept."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in tracked:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


@pytest.fixture(scope="session")
def distributions(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that is built from the sdist."""
    output = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(output), str(checkout)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return output


def environment() -> dict[str, str]:
    """The environment without what would make a checkout importable."""
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
