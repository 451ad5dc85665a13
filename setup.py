"""Builds the native JPEG decoder with the package; without a C++ compiler the package installs all the same."""

import importlib.util
from pathlib import Path
from types import ModuleType

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = Path("falconet/data/native")


def native_build() -> ModuleType:
    """falconet/data/native/compiler.py by its path: the package cannot be imported before it is installed."""
    spec = importlib.util.spec_from_file_location("native_build", Path(__file__).parent / NATIVE / "compiler.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildWithNative(build_py):
    """Adds the library beside its module: in the source tree for an editable install, else in what is being built."""

    def run(self) -> None:
        super().run()
        native = native_build()
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


setup(cmdclass={"build_py": BuildWithNative, "bdist_wheel": PlatformWheel})
