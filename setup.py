"""Builds what is not Python: the gRPC interface, and the native JPEG decoder if there is a C++ compiler."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = Path("falconet/data/native")
INTERFACE = Path("falconet/serve/interface")


def by_path(path: Path) -> ModuleType:
    """A module of the package by its path: the package cannot be imported before it is installed."""
    spec = importlib.util.spec_from_file_location(f"build_{path.stem}", Path(__file__).parent / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildWithCompiled(build_py):
    """Adds what is compiled beside its module: in the source tree for an editable install, else in what is built."""

    def run(self) -> None:
        super().run()
        interface = by_path(INTERFACE / "descriptors.py")
        try:
            interface.build(interface.HERE if self.editable_mode else Path(self.build_lib) / INTERFACE)
        except interface.CannotBuildError as error:
            # Not an Exception: setuptools turns those of an editable install into a warning, which pip does not show.
            sys.exit(f"error: the gRPC interface was not compiled: {error}")
        native = by_path(NATIVE / "compiler.py")
        try:
            native.build(native.HERE if self.editable_mode else Path(self.build_lib) / NATIVE)
        except native.CannotBuildError as error:
            self.warn(f"the native JPEG decoder was not built, photographs will be decoded by Pillow: {error}")


class PlatformWheel(bdist_wheel):
    """The library is loaded by ctypes: any Python 3, but one kind of machine only."""

    def get_tag(self) -> tuple[str, str, str]:
        if not any((Path(self.bdist_dir or "") / NATIVE).glob("*.so")):
            return super().get_tag()
        self.root_is_pure = False
        return ("py3", "none", super().get_tag()[2])


setup(cmdclass={"build_py": BuildWithCompiled, "bdist_wheel": PlatformWheel})
