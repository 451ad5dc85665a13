"""The library is built by the system's compiler; without one, the reason is reported."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from falconet.data import native
from falconet.data.native import binding, compiler

ROOT = Path(__file__).parents[3]
CLANG = shutil.which("clang++") or ""
WARNINGS = ("-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Wno-sign-conversion")


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A copy of the package's native folder, which a test may spoil."""
    here = tmp_path / "native"
    shutil.copytree(compiler.HERE, here)
    monkeypatch.setattr(compiler, "HERE", here)
    monkeypatch.setattr(compiler, "SOURCES", here / "src")
    binding.load.cache_clear()
    yield here
    binding.load.cache_clear()


def test_the_built_library_is_loaded(library):
    assert native.library() is library
    assert native.why_not() == ""
    assert library.processor in ("avx2", "portable")


def test_a_missing_library_is_explained(elsewhere):
    (elsewhere / compiler.LIBRARY).unlink(missing_ok=True)
    assert native.library() is None
    assert native.why_not() == "not built; `python -m falconet.data.native.compiler` builds it with a C++ compiler"


def test_a_library_built_from_other_sources_is_not_loaded(library, elsewhere):
    with (elsewhere / "src" / "axis.cpp").open("a") as file:
        file.write("// changed\n")
    assert native.library() is None
    assert native.why_not() == "built from other sources; run `python -m falconet.data.native.compiler`"


def test_a_library_older_than_some_functions_is_to_be_built_again(library, elsewhere):
    code = elsewhere / "old.cpp"
    code.write_text('extern "C" const char* falconet_sources() { return "0123456789abcdef"; }')
    (elsewhere / compiler.LIBRARY).unlink()
    line = [compiler.find_compiler(), "-shared", "-fPIC", code, "-o", elsewhere / compiler.LIBRARY]
    subprocess.run(line, check=True)
    assert native.library() is None
    assert native.why_not() == "built from other sources; run `python -m falconet.data.native.compiler`"


def test_a_file_that_is_not_a_library_is_not_loaded(elsewhere):
    (elsewhere / compiler.LIBRARY).write_bytes(b"not a library")
    assert native.library() is None
    assert native.why_not().startswith("cannot be loaded (")
    assert "\n" not in native.why_not()


def test_a_variable_switches_the_library_off(monkeypatch):
    monkeypatch.setenv("FALCONET_NATIVE", "0")
    binding.load.cache_clear()
    assert (native.library(), native.why_not()) == (None, "turned off by FALCONET_NATIVE=0")
    binding.load.cache_clear()


def test_a_missing_compiler_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(
        compiler.CannotBuildError, match=r"no C\+\+ compiler found \(looked for CXX, c\+\+, g\+\+, clang\+\+\)"
    ):
        compiler.build(tmp_path)


def test_a_failing_compiler_leaves_no_files(library, tmp_path, monkeypatch):
    with pytest.raises(compiler.CannotBuildError, match=r"failed: .*error"):
        compiler.build(tmp_path / "made", flags=("--no-such-flag",))
    assert list((tmp_path / "made").iterdir()) == []


def test_the_users_compiler_comes_first(tmp_path, monkeypatch):
    mine = tmp_path / "my-c++"
    mine.write_text("#!/bin/sh\n")
    mine.chmod(0o755)
    monkeypatch.setenv("CXX", str(mine))
    assert compiler.find_compiler() == str(mine)


def test_the_build_command_reports_a_failure_in_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, compiler.__file__], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("falconet: the native JPEG decoder was not built: no C++ compiler found")
    assert done.stderr.count("\n") == 1


@pytest.mark.run
def test_the_package_builds_without_a_compiler(tmp_path):
    line = ["egg_info", "--egg-base", tmp_path, "build_py", "--build-lib", tmp_path / "built"]
    done = subprocess.run(
        [sys.executable, "setup.py", *line],
        cwd=ROOT,
        env=os.environ | {"CXX": "", "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "the native JPEG decoder was not built, photographs will be decoded by Pillow" in done.stderr
    assert (tmp_path / "built" / "falconet" / "cli.py").exists()


def test_the_build_needs_only_the_standard_library():
    """setup.py runs it before anything is installed."""
    code = f"import runpy; runpy.run_path({compiler.__file__!r})"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)


@pytest.mark.skipif(not CLANG, reason="clang++ is not installed")
@pytest.mark.slow
def test_another_compiler_builds_it_without_a_warning(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", CLANG)
    compiler.build(tmp_path, flags=(*compiler.FLAGS, *WARNINGS, "-Werror"))


@pytest.mark.run
def test_it_builds_without_a_warning(library, tmp_path):
    made = compiler.build(tmp_path, flags=("-std=c++17", "-O0", "-fPIC", *WARNINGS, "-Werror"))
    assert binding.built_from(made) == compiler.digest()
    assert binding.Library(made).processor == library.processor
