"""The library is built by the system's compiler; without one, the reason is reported."""

import shutil
import subprocess
import sys

import pytest

from falconet.data import native
from falconet.data.native import binding, compile

CLANG = shutil.which("clang++") or ""
WARNINGS = ("-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Wno-sign-conversion")


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """The package's native folder copied, so that a test may spoil it."""
    here = tmp_path / "native"
    shutil.copytree(compile.HERE, here)
    monkeypatch.setattr(compile, "HERE", here)
    monkeypatch.setattr(compile, "SOURCES", here / "src")
    binding.load.cache_clear()
    yield here
    binding.load.cache_clear()


def test_the_library_is_there_without_a_reason(library):
    assert native.library() is library
    assert native.why_not() == ""
    assert library.processor in ("avx2", "portable")


def test_not_built(elsewhere):
    (elsewhere / compile.LIBRARY).unlink(missing_ok=True)
    assert native.library() is None
    assert native.why_not() == "not built; `python -m falconet.data.native.compile` builds it with a C++ compiler"


def test_built_from_other_sources(library, elsewhere):
    with (elsewhere / "src" / "axis.cpp").open("a") as file:
        file.write("// changed\n")
    assert native.library() is None
    assert native.why_not() == "built from other sources; run `python -m falconet.data.native.compile`"


def test_a_library_of_another_kind(elsewhere):
    (elsewhere / compile.LIBRARY).write_bytes(b"not a library")
    assert native.library() is None
    assert native.why_not().startswith("cannot be loaded (")
    assert "\n" not in native.why_not()


def test_switched_off(monkeypatch):
    monkeypatch.setenv("FALCONET_NATIVE", "0")
    binding.load.cache_clear()
    assert (native.library(), native.why_not()) == (None, "turned off by FALCONET_NATIVE=0")
    binding.load.cache_clear()


def test_no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(
        compile.CannotBuildError, match=r"no C\+\+ compiler found \(looked for CXX, c\+\+, g\+\+, clang\+\+\)"
    ):
        compile.build(tmp_path)


def test_a_failing_compiler_leaves_no_files(library, tmp_path, monkeypatch):
    with pytest.raises(compile.CannotBuildError, match=r"failed: .*error"):
        compile.build(tmp_path / "made", flags=("--no-such-flag",))
    assert list((tmp_path / "made").iterdir()) == []


def test_the_users_compiler_comes_first(tmp_path, monkeypatch):
    mine = tmp_path / "my-c++"
    mine.write_text("#!/bin/sh\n")
    mine.chmod(0o755)
    monkeypatch.setenv("CXX", str(mine))
    assert compile.compiler() == str(mine)


def test_the_command_says_in_one_line_why_it_failed(tmp_path):
    done = subprocess.run(
        [sys.executable, compile.__file__], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("falconet: the native JPEG decoder was not built: no C++ compiler found")
    assert done.stderr.count("\n") == 1


def test_the_build_needs_only_the_standard_library():
    """setup.py runs it before anything is installed."""
    code = f"import runpy; runpy.run_path({compile.__file__!r})"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)


@pytest.mark.skipif(not CLANG, reason="clang++ is not installed")
@pytest.mark.slow
def test_another_compiler_builds_it_without_a_warning(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", CLANG)
    compile.build(tmp_path, flags=(*compile.FLAGS, *WARNINGS, "-Werror"))


def test_it_builds_without_a_warning(library, tmp_path):
    made = compile.build(tmp_path, flags=("-std=c++17", "-O0", "-fPIC", *WARNINGS, "-Werror"))
    assert binding.Library(made).sources == library.sources
