"""The gRPC interface is compiled when the package is built, and its parts equal those of the published one."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from tritonclient.grpc import model_config_pb2, service_pb2

from falconet.serve.interface import descriptors

ROOT = Path(__file__).parents[2]
PUBLISHED = {
    **service_pb2.DESCRIPTOR.message_types_by_name,
    **model_config_pb2.DESCRIPTOR.message_types_by_name,
}


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A copy of the sources, which a test may spoil."""
    here = tmp_path / "interface"
    here.mkdir()
    for source in descriptors.HERE.glob("*.proto"):
        shutil.copy(source, here)
    monkeypatch.setattr(descriptors, "HERE", here)
    return here


def described(built):
    return {file.package: file for file in FileDescriptorSet.FromString(built.read_bytes()).file}


def test_every_field_has_the_number_and_type_of_the_published_interface(tmp_path):
    def compare(ours, published):
        for field in ours.field:
            theirs = published.fields_by_name[field.name]
            assert (field.number, field.type) == (theirs.number, theirs.type), field.name
            assert (field.label == field.LABEL_REPEATED) == theirs.is_repeated, field.name
            if field.type_name:
                kind = theirs.message_type or theirs.enum_type
                assert field.type_name == f".{kind.full_name}"
        for nested in ours.nested_type:
            compare(nested, published.nested_types_by_name[nested.name])

    file = described(descriptors.build(tmp_path))["inference"]
    assert len(file.message_type) > 30
    for ours in file.message_type:
        compare(ours, PUBLISHED[ours.name])
    (types,) = file.enum_type
    published = model_config_pb2.DESCRIPTOR.enum_types_by_name[types.name]
    for value in types.value:
        assert value.number == published.values_by_name[value.name].number


def test_every_method_is_that_of_the_published_interface(tmp_path):
    (ours,) = described(descriptors.build(tmp_path))["inference"].service
    published = service_pb2.DESCRIPTOR.services_by_name[ours.name]
    for method in ours.method:
        theirs = published.methods_by_name[method.name]
        assert method.input_type == f".{theirs.input_type.full_name}"
        assert method.output_type == f".{theirs.output_type.full_name}"
        assert (method.client_streaming, method.server_streaming) == (theirs.client_streaming, theirs.server_streaming)
    left_out = set(published.methods_by_name) - {method.name for method in ours.method}
    assert all(any(word in name for word in ("SharedMemory", "Trace", "Log")) for name in left_out)


def test_a_missing_interface_is_explained(elsewhere):
    with pytest.raises(descriptors.NotBuiltError) as error:
        descriptors.read()
    assert str(error.value) == (
        "the gRPC interface is not compiled;"
        " `python -m falconet.serve.interface.descriptors` compiles it with grpcio-tools"
    )


def test_an_interface_of_other_sources_is_not_used_and_then_replaced(elsewhere):
    old = descriptors.build(elsewhere)
    assert descriptors.read() == old.read_bytes()
    with (elsewhere / "health.proto").open("a") as file:
        file.write("// changed\n")
    with pytest.raises(descriptors.NotBuiltError, match="is compiled from other sources; `python -m"):
        descriptors.read()
    new = descriptors.build(elsewhere)
    assert list(elsewhere.glob("*.binpb")) == [new]


def test_a_mistake_in_the_interface_is_reported_and_leaves_no_files(elsewhere, tmp_path):
    (elsewhere / "health.proto").write_text('syntax = "proto3";\nmessage Broken {\n')
    with pytest.raises(descriptors.CannotBuildError, match=r"grpc_tools.protoc failed: .*health\.proto"):
        descriptors.build(tmp_path / "made")
    assert list((tmp_path / "made").iterdir()) == []


def test_missing_tools_are_reported_in_one_line(tmp_path):
    (tmp_path / "grpc_tools.py").write_text("raise ModuleNotFoundError(\"No module named 'grpc_tools'\")")
    done = subprocess.run(
        [sys.executable, descriptors.__file__],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("falconet: the gRPC interface was not compiled: grpc_tools.protoc failed: ")
    assert "No module named 'grpc_tools'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_build_needs_only_the_standard_library():
    """setup.py runs it before anything is installed."""
    code = f"import runpy; runpy.run_path({descriptors.__file__!r})"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)


def copy_of_package(folder):
    """Copy what the build needs from the source tree, without what is compiled."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.binpb")
    for name in ("falconet", "compat"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def built(folder, hook, out):
    """Build as pip does, in an environment that meets the build's requirements."""
    out.mkdir(exist_ok=True)
    line = [sys.executable, "-c", BUILD, hook, str(out)]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.run
def test_a_wheel_and_an_editable_install_have_the_compiled_interface(tmp_path):
    source = copy_of_package(tmp_path / "source")
    name = descriptors.compiled()
    done = built(source, "build_wheel", tmp_path / "wheel")
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    shutil.unpack_archive(wheel, tmp_path / "unpacked", "zip")
    assert (tmp_path / "unpacked" / "falconet" / "serve" / "interface" / name).exists()
    assert (tmp_path / "unpacked" / "falconet" / "serve" / "interface" / "inference.proto").exists()
    assert not (source / "falconet" / "serve" / "interface" / name).exists()
    done = built(source, "build_editable", tmp_path / "editable")
    assert done.returncode == 0, done.stderr
    assert (source / "falconet" / "serve" / "interface" / name).exists()


@pytest.mark.run
@pytest.mark.parametrize("hook", ["build_wheel", "build_editable"])
def test_a_mistake_in_the_interface_stops_the_build(tmp_path, hook):
    """An editable install stops too, where setuptools would turn an exception into a warning that pip hides."""
    source = copy_of_package(tmp_path / "source")
    (source / "falconet" / "serve" / "interface" / "health.proto").write_text("message {")
    done = built(source, hook, tmp_path / "out")
    assert done.returncode != 0
    assert "error: the gRPC interface was not compiled: grpc_tools.protoc failed: health.proto" in done.stderr
