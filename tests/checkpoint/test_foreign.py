"""Foreign weights load when they fit, whatever their names, and run nothing when they are hostile."""

import argparse
import collections
import io
import os
import pickle
import random
import resource
import zipfile

import pytest
import safetensors.torch
import timm
import torch
from torch import nn

from falconet.checkpoint.foreign import fit, fitting_model, load_foreign, load_weights, read_file, read_weights
from falconet.errors import CheckpointError
from falconet.models import zoo

TORN = "truncated, or neither safetensors nor a torch weights file"


def weights():
    return {"fc.weight": torch.arange(6.0).reshape(2, 3), "fc.bias": torch.tensor([1.0, 2.0]).half()}


def prefixed(prefix):
    return {f"{prefix}{name}": tensor for name, tensor in weights().items()}


WRAPPED = {
    "plain": weights(),
    "state_dict": {"state_dict": weights(), "epoch": 3},
    "model_state_dict": {"model_state_dict": weights(), "optimizer_state_dict": {"lr": 1}},
    "model and its average": {"model": weights(), "model_ema": {"fc.weight": torch.zeros(1)}},
    "the average alone": {"model_ema": weights(), "epoch": 3},
    "two deep": {"model": {"state_dict": weights()}},
    "replicas": prefixed("module."),
    "compiled": prefixed("_orig_mod."),
    "both": {"state_dict": prefixed("module._orig_mod.")},
    "both, the other way": prefixed("_orig_mod.module."),
    "compiled inside": {name.replace("fc.", "fc._orig_mod."): tensor for name, tensor in weights().items()},
    "an average of torch": prefixed("module.") | {"n_averaged": torch.tensor(7)},
    "timm's average alone": {"state_dict_ema": prefixed("module."), "epoch": 3},
    "an average called ema": {"ema": weights(), "optimizer": {}},
    "replicas inside": {name.replace("fc.", "fc.module."): tensor for name, tensor in weights().items()},
    "parameters": {name: nn.Parameter(tensor) for name, tensor in weights().items()},
}


def assert_same(read):
    assert read.keys() == weights().keys()
    for name, tensor in weights().items():
        assert read[name].dtype == tensor.dtype
        assert not read[name].requires_grad
        assert torch.equal(read[name], tensor)


@pytest.mark.parametrize("case", WRAPPED)
@pytest.mark.parametrize("suffix", [".pt", ".th", ".pth.tar", ".safetensors", ""])
def test_weights_are_read_from_any_trainer_wrapper(tmp_path, case, suffix):
    path = tmp_path / f"w{suffix}"
    torch.save(WRAPPED[case], path)
    assert_same(read_weights(path))


def test_the_oldest_torch_files_are_read(tmp_path):
    torch.save(weights(), tmp_path / "w.pth", _use_new_zipfile_serialization=False)
    assert_same(read_weights(tmp_path / "w.pth"))


@pytest.mark.parametrize("name", ["w.safetensors", "w.pth", "w"])
def test_safetensors_are_read_under_any_name(tmp_path, name):
    safetensors.torch.save_file(prefixed("module."), tmp_path / name)
    assert_same(read_weights(tmp_path / name))


class Hostile:
    """Unpickled the careless way, creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


class Greedy:
    def __reduce__(self):
        return bytearray, (1 << 60,)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_hostile_pickle_is_refused_and_runs_nothing(tmp_path, protocol):
    path, trap = tmp_path / "w.pt", tmp_path / "trap"
    path.write_bytes(pickle.dumps({"state_dict": Hostile(trap)}, protocol=protocol))
    with pytest.raises(CheckpointError, match=rf"w\.pt: (refused: it would import posix\.mkdir|{TORN})"):
        read_weights(path)
    assert not trap.exists()
    pickle.loads(path.read_bytes())
    assert trap.exists(), "the trap does not work, so the test shows nothing"


def test_a_hostile_object_inside_a_torch_file_is_refused(tmp_path):
    torch.save({"fc.weight": torch.ones(1), "x": Hostile(tmp_path / "trap")}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"refused: it would import posix\.mkdir"):
        read_weights(tmp_path / "w.pt")
    assert not (tmp_path / "trap").exists()


def as_torch_file(thing):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


def endless():
    found = {"fc.weight": torch.ones(1)}
    found["state_dict"] = found
    return found


def rewritten(whole, change, compression=zipfile.ZIP_STORED):
    """A torch file with its pickle and its storages changed."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(buffer, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return buffer.getvalue()


def pickled(content):
    """A torch file with this pickle."""
    return rewritten(as_torch_file({}), lambda name, data: content if name.endswith("data.pkl") else data)


def copying():
    """100,000 pairs, copied into 100,000 dictionaries: 10 billion entries from 500 kB."""
    pairs = b"](" + b"K\x01K\x02\x86" * 100_000 + b"e\x85q\x000"  # a tuple of one list, memo 0
    return b"\x80\x02" + pairs + b"](" + b"ccollections\nOrderedDict\nh\x00R" * 100_000 + b"e."


def beyond():
    """A tensor of a million values, of which four are there."""

    def claim(name, data):
        return data.replace(b"K\x04", b"J\x40\x42\x0f\x00") if name.endswith("data.pkl") else data

    return rewritten(as_torch_file({"w": torch.ones(4)}), claim)


def enlarged(tensor):
    """A tensor of 7 values that claims a million."""

    def claim(name, data):
        return data.replace(b"K\x07\x85", b"J\x40\x42\x0f\x00\x85") if name.endswith("data.pkl") else data

    return rewritten(as_torch_file({"w": tensor}), claim)


def typed(function, given):
    """A tensor with attributes that another function than torch's makes."""
    call = b"ctorch._tensor\n_rebuild_from_type_v2\n(" + function + b"ctorch\nTensor\n" + given + b"}tR"
    return pickled(b"\x80\x02}X\x01\x00\x00\x00w" + call + b"s.")


NONSENSE = {
    "empty": (b"", TORN),
    "a web page": (b"<!DOCTYPE html><title>404</title>" * 100, "is a web page or XML, not weights; a download that"),
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "`git lfs pull` fetches the"),
    "photo": (b"\xff\xd8\xff\xe0" + bytes(100), "is a photo; expected a run, a checkpoint or a weights file"),
    "drawing": (b"\x89PNG\r\n\x1a\n" + bytes(100), "is a photo; expected a run, a checkpoint or a weights file"),
    "gzip": (b"\x1f\x8b\x08" + bytes(100), "is compressed with gzip; expected the file inside"),
    "a tar archive": (b"w.pt".ljust(257, b"\0") + b"ustar" + bytes(300), "is a tar archive; expected the file inside"),
    "Keras": (b"\x89HDF\r\n" + bytes(100), "is HDF5, as Keras writes it; expected safetensors or"),
    "text": (b"Please log in " * 100, TORN),
    "a pickled module": (as_torch_file(nn.ReLU()), r"import torch\.nn\.modules\.activation\.ReLU; .*state_dict\(\)"),
    "noise": (random.Random(0).randbytes(5000), TORN),
    "a broken zip": (b"PK\x03\x04" + bytes(4000), TORN),
    "a greedy pickle": (as_torch_file({"w": Greedy()}), r"refused: it would import builtins\.bytearray"),
    "a number for a name": (as_torch_file({3: torch.ones(1)}), "a tensor is called by a int; expected only names"),
    "a tensor without values": (
        as_torch_file({"w": torch.ones(1, device="meta")}),
        "'w' is sparse, complex or without",
    ),
    "a sparse tensor": (as_torch_file({"w": torch.eye(3).to_sparse()}), "'w' is sparse, complex or without"),
    "complex numbers": (as_torch_file({"w": torch.ones(2, dtype=torch.complex64)}), "sparse, complex or without"),
    "itself": (as_torch_file(endless()), "its weights are wrapped more than 8 times"),
    "copies of copies": (pickled(copying()), TORN),
    "a storage beyond its bytes": (beyond(), TORN),
    "a tensor beyond its storage": (enlarged(torch.ones(7)), TORN),
    "a tensor beyond its untyped storage": (enlarged(torch.ones(7, dtype=torch.uint16)), TORN),
    "a tensor made by bytearray": (typed(b"c__builtin__\nbytearray\n", b"J\xff\xff\xff\x7f\x85"), TORN),
    "a tensor made by a storage": (typed(b"ctorch\nFloatStorage\n", b"J\xff\xff\xff\x7f\x85"), TORN),
    "a million sets": (pickled(b"\x80\x02](" + b"\x8f" * (1 << 20) + b"e."), TORN),
    "a set in the weights": (as_torch_file({"w": {1}}), "'w' is set; expected only names and tensors"),
    "a list": (as_torch_file([torch.ones(1)]), "holds list; expected names and tensors"),
    "a tensor": (as_torch_file(torch.ones(1)), "holds Tensor; expected names and tensors"),
    "numbers": (as_torch_file({"epoch": 3}), "'epoch' is int; expected only names and tensors"),
    "nothing": (as_torch_file({"state_dict": {}}), "holds no tensors"),
    "a name twice": (as_torch_file({"w": torch.ones(1), "module.w": torch.ones(1)}), "two tensors are called 'w'"),
}


@pytest.mark.parametrize("case", NONSENSE)
def test_nonsense_is_refused_in_one_line(tmp_path, case):
    data, message = NONSENSE[case]
    (tmp_path / "w.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_weights(tmp_path / "w.pt")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_missing_file_and_a_folder_are_refused(tmp_path, suffix):
    with pytest.raises(CheckpointError, match=f"none{suffix}: No such file or directory"):
        read_weights(tmp_path / f"none{suffix}")
    (tmp_path / f"folder{suffix}").mkdir()
    with pytest.raises(CheckpointError, match=f"folder{suffix}: Is a directory"):
        read_weights(tmp_path / f"folder{suffix}")


@pytest.mark.parametrize("new", [True, False])
def test_a_torch_file_truncated_anywhere_is_refused(tmp_path, new):
    path = tmp_path / "w.pt"
    torch.save(weights(), path, _use_new_zipfile_serialization=new)
    data = path.read_bytes()
    for length in range(0, len(data) - 1, 7):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=f"{TORN}|refused"):  # a name cut short is a name unknown
            read_weights(path)


@pytest.mark.parametrize("new", [True, False])
def test_a_damaged_torch_file_is_read_or_refused_but_never_crashes(tmp_path, new):
    path = tmp_path / "w.pt"
    torch.save(weights(), path, _use_new_zipfile_serialization=new)
    data, dice = path.read_bytes(), random.Random(0)
    refused = []
    for _ in range(500):
        damaged = bytearray(data)
        damaged[dice.randrange(len(data))] = dice.randrange(256)
        path.write_bytes(damaged)
        try:
            read_weights(path)  # torch keeps no digest: a flipped weight passes
        except CheckpointError as error:
            refused.append(str(error))
    assert len(refused) > 50
    assert not any("\n" in message for message in refused)


def test_a_safetensors_file_truncated_anywhere_is_refused(tmp_path):
    data = safetensors.torch.save(weights())
    for length in range(len(data)):
        (tmp_path / "w.safetensors").write_bytes(data[:length])
        with pytest.raises(CheckpointError, match="truncated, or n"):
            read_weights(tmp_path / "w.safetensors")


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)


def test_weights_that_fit_are_copied_and_strides_kept():
    source = {name: torch.ones_like(tensor).contiguous() for name, tensor in small_model().state_dict().items()}
    model = small_model()
    load_weights(model, source, where="x.pth")
    assert all(torch.equal(tensor, source[name]) for name, tensor in model.state_dict().items())
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


def without(*names):
    return {name: tensor for name, tensor in small_model().state_dict().items() if name not in names}


MISFITS = {
    "missing": (without("0.bias", "1.weight", "1.bias"), "3 missing (0.bias, 1.weight, 1.bias)"),
    "unexpected": (without() | {"fc.bias": torch.ones(1)}, "1 unexpected (fc.bias)"),
    "another shape": (
        without() | {"0.weight": torch.ones(9, 3)},
        "1 with another shape (0.weight 9x3, expected 4x3x3x3)",
    ),
    "all": (
        without("0.bias") | {"fc.bias": torch.ones(1), "1.bias": torch.tensor(1.0)},
        "1 missing (0.bias), 1 unexpected (fc.bias), 1 with another shape (1.bias scalar, expected 4)",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_weights_that_do_not_fit_are_counted_and_change_nothing(case):
    given, message = MISFITS[case]
    model, before = small_model(), small_model().state_dict()
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, {name: tensor + 1 for name, tensor in given.items()}, where="x.pth", name="resnet50")
    assert str(caught.value) == f"x.pth does not fit resnet50: {message}"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path):
    path = tmp_path / "w.pt"
    many = as_torch_file({"w": torch.zeros(1)})

    def grown(name, data):
        return bytes(200_000_000) if name.endswith("data/0") else data

    path.write_bytes(rewritten(many, grown, zipfile.ZIP_DEFLATED))
    assert path.stat().st_size < 1_000_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=r"bytes unpack to 200,\d+,\d+; expected at most 4 times as many$"):
        read_weights(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB


def test_an_endless_list_of_contents_is_refused(tmp_path):
    path = tmp_path / "w.pt"
    path.write_bytes(pickled(b"\x80\x02" + b"]" * (33 << 20) + b"."))
    with pytest.raises(CheckpointError, match="the list of its contents is longer than 33,554,432 bytes"):
        read_weights(path)


def test_weights_compressed_by_another_program_are_read(tmp_path):
    path = tmp_path / "w.pt"
    path.write_bytes(rewritten(as_torch_file(weights()), lambda _, data: data, zipfile.ZIP_DEFLATED))
    assert_same(read_weights(path))


def test_a_whole_training_checkpoint_is_read(tmp_path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "lr_scheduler": schedule.state_dict()}
    torch.save(whole | {"epoch": 3, "rng": torch.get_rng_state(), "about": b"x"}, tmp_path / "w.pth")
    assert read_weights(tmp_path / "w.pth").keys() == {"weight", "bias"}


def noted(tensor):
    tensor.note = "from the teacher"
    return tensor


BESIDE = {
    "a set": {1, 2},
    "a bytearray": bytearray(b"\x00\xff"),
    "a complex number": 1j,
    "a sparse tensor": torch.eye(3).to_sparse(),
    "a tensor without values": torch.ones(1, device="meta"),
    "a parameter": nn.Parameter(torch.ones(2)),
    "a parameter with an attribute": noted(nn.Parameter(torch.ones(2))),
    "a type": torch.float8_e4m3fn,
    "600,000 losses": [1.5 + number for number in range(600_000)],
}


@pytest.mark.parametrize("what", BESIDE)
def test_what_torch_reads_beside_the_weights_is_no_reason_to_refuse_them(tmp_path, what):
    torch.save({"state_dict": weights(), "more": BESIDE[what]}, tmp_path / "w.pt")
    assert_same(read_weights(tmp_path / "w.pt"))


UNUSUAL = {
    "with an attribute": noted(torch.arange(3.0)),
    "uint16": torch.arange(3).to(torch.uint16),
    "float8": torch.arange(3.0).to(torch.float8_e4m3fn),
    "repeated": torch.ones(1).expand(1000),
    "a view": torch.arange(12.0).reshape(3, 4)[1:, ::2],
    "empty": torch.ones(0, 3),
}


@pytest.mark.parametrize("what", UNUSUAL)
def test_unusual_tensors_that_torch_reads_are_read(tmp_path, what):
    torch.save({"w": UNUSUAL[what]}, tmp_path / "w.pt")
    assert torch.equal(read_weights(tmp_path / "w.pt")["w"].float(), UNUSUAL[what].float())


def arguments(**more):
    return argparse.Namespace(
        model="resnet50", norm_type="group", splits=["layer1"], lr=0.1, nested=[{"a": (1,)}], **more
    )


@pytest.mark.parametrize("key", ["args", "opts"])
@pytest.mark.parametrize("new", [True, False])
def test_a_namespace_beside_the_weights_is_read_as_a_dictionary(tmp_path, key, new):
    whole = {"epoch": 3, "model_state_dict": weights(), "loss": 0.5, key: arguments()}
    torch.save(whole, tmp_path / "w.pt", _use_new_zipfile_serialization=new)
    file = read_file(tmp_path / "w.pt")
    assert_same(file.weights)
    assert file.arguments == vars(arguments())


class Namespace:
    """Of the same name, in another module."""


class Inherited(argparse.Namespace):
    pass


class Calling:
    """A namespace made by a call, or with a state that is not a dictionary of names."""

    def __init__(self, *made):
        self.made = made

    def __reduce__(self):
        return self.made


def made_of(state):
    return Calling(argparse.Namespace, (), state)


def as_new(*given, state):
    """The operations of a namespace that is made as argparse's own pickles are, with this state."""
    return b"\x80\x02cargparse\nNamespace\n(" + b"".join(given) + b"t\x81" + state + b"b."


def many_namespaces():
    """10,000 names, copied into 10,000 namespaces."""
    names = b"}(" + b"".join(b"X\x05\x00\x00\x00%05dK\x01" % number for number in range(10_000)) + b"uq\x00"
    return b"\x80\x02](" + names + b"cargparse\nNamespace\n)\x81h\x00b" * 10_000 + b"e."


HOSTILE = {
    "a call in its state": lambda trap: as_torch_file({"args": arguments(trap=Hostile(trap))}),
    "a call as its state": lambda trap: as_torch_file({"args": made_of(Hostile(trap))}),
    "a call deep inside": lambda trap: as_torch_file(
        {"args": arguments(deep=[[{"a": argparse.Namespace(b=Hostile(trap))}]])}
    ),
    "a call of the class": lambda trap: as_torch_file({"args": Calling(argparse.Namespace, (1,))}),
    "another class of that name": lambda trap: as_torch_file({"args": Namespace()}),
    "a class derived from it": lambda trap: as_torch_file({"args": Inherited()}),
    "another class of argparse": lambda trap: as_torch_file({"args": Calling(argparse.Action, ((), ""))}),
    "the parser": lambda trap: as_torch_file({"args": argparse.ArgumentParser.parse_args}),
    "attributes set one by one": lambda trap: pickled(
        as_new(state=b"N}X\x09\x00\x00\x00__class__ccollections\nOrderedDict\ns\x86")
    ),
    "a state of numbers": lambda trap: pickled(as_new(state=b"}K\x01K\x02s")),
    "an ordered state": lambda trap: as_torch_file({"args": made_of(collections.OrderedDict(a=1))}),
    "arguments": lambda trap: pickled(as_new(b"K\x01", state=b"}")),
    "copies of copies": lambda trap: pickled(many_namespaces()),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_namespace_that_does_more_than_hold_names_is_refused(tmp_path, case):
    path, trap = tmp_path / "w.pt", tmp_path / "trap"
    path.write_bytes(HOSTILE[case](trap))
    with pytest.raises(CheckpointError, match=f"refused: it would import|{TORN}") as caught:
        read_file(path)
    assert "\n" not in str(caught.value)
    assert not trap.exists()


@pytest.mark.slow
def test_a_million_namespaces_are_refused(tmp_path):
    many = b"\x80\x02](cargparse\nNamespace\nq\x00)\x81" + b"h\x00)\x81" * (1 << 20) + b"e."
    (tmp_path / "w.pt").write_bytes(pickled(many))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=TORN):
        read_file(tmp_path / "w.pt")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_000_000  # kB


def test_deep_nesting_beside_the_weights_is_read_or_refused(tmp_path):
    (tmp_path / "w.pt").write_bytes(pickled(b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."))
    with pytest.raises(CheckpointError, match=r"holds list; expected names and tensors|truncated"):
        read_file(tmp_path / "w.pt")


def test_a_file_without_the_batches_counted_loads_as_in_torch():
    source = small_model()
    old = {name: tensor + 1 for name, tensor in source.state_dict().items() if "num_batches" not in name}
    model = small_model()
    load_foreign(model, old, where="x.pth")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in old.items())
    assert model[1].num_batches_tracked == 0
    with pytest.raises(CheckpointError, match="1 missing"):
        load_weights(model, old, where="a checkpoint of ours")


CLASSIFIERS = (
    "fc",
    "linear",
    "head",
    "head.fc",
    "classifier",
    "classifier.1",
    "last_linear",
    "model.fc",
    "net.model.linear",
)


@pytest.mark.parametrize("name", CLASSIFIERS)
@pytest.mark.parametrize("order", [list, sorted])
def test_the_classifier_may_have_any_name(name, order):
    source = zoo.build("resnet8-cifar", classes=10, seed=1).state_dict()
    prefix, _, head = name.rpartition(".") if name.startswith(("model", "net")) else ("", "", name)
    before = f"{prefix}." if prefix else ""
    given = {f"{before}{key.replace('fc.', f'{head}.')}": tensor for key, tensor in source.items()}
    model = zoo.build("resnet8-cifar", classes=10, seed=0)
    load_foreign(model, {key: given[key] for key in order(given)}, where="x.pth")
    assert all(torch.equal(tensor, source[key]) for key, tensor in model.state_dict().items())


def trained_like(model):
    """Statistics and scales of their own in every batch norm, so that a mistaken layer changes the output."""
    torch.manual_seed(1)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_(0, 0.1)
            layer.running_var.uniform_(0.5, 1.5)
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias, 0, 0.1)
    return model.double().eval()


TORCHVISION = {
    "resnet18": ("resnet18", {}),
    "resnext50": ("resnext50_32x4d", {}),
    "mobilenet": ("mobilenet_v2", {}),
    "mobilenet-v3-small": ("mobilenet_v3_small", {"norm_eps": 1e-3}),
    "mobilenet-v3-large": ("mobilenet_v3_large", {"norm_eps": 1e-3}),
    "efficientnet-b0": ("efficientnet_b0", {}),
    "squeezenet": ("squeezenet1_0", {}),
}
TIMM = {
    "resnet18": "resnet18",
    "resnext50": "resnext50_32x4d",
    "mobilenet": "mobilenetv2_100",
    "mobilenet-v3-small": "mobilenetv3_small_100",
    "efficientnet-b0": "efficientnet_b0",
}


def largest_difference(model, other):
    images = torch.randn(2, 3, 64, 64, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = other(images)
        return ((model.eval()(images) - expected).abs().max() / expected.abs().max()).item()


NUMBERED = ("mobilenet", "mobilenet-v3-small", "efficientnet-b0")  # whose order is known in safetensors too


@pytest.mark.parametrize(
    ("name", "order"), [*((name, list) for name in TORCHVISION), *((name, sorted) for name in NUMBERED)]
)
def test_torchvisions_weights_give_torchvisions_outputs(name, order):
    import torchvision

    theirs, options = TORCHVISION[name]
    other = trained_like(getattr(torchvision.models, theirs)(weights=None, num_classes=10))
    model = zoo.build(name, classes=10, seed=0, **options).double()
    given = other.state_dict()
    load_foreign(model, {key: given[key] for key in order(given)}, where="x.pth", name=name)
    assert largest_difference(model, other) < 1e-13


@pytest.mark.parametrize("name", TIMM)
def test_timms_weights_give_timms_outputs(name):
    import timm

    other = trained_like(timm.create_model(TIMM[name], pretrained=False, num_classes=10))
    model = zoo.build(name, classes=10, seed=0).double()
    load_foreign(model, other.state_dict(), where="x.pth", name=name)
    assert largest_difference(model, other) < 1e-13


def test_layers_in_another_order_are_not_guessed():
    """Of two layers of one shape the names do not show which is which, and a sorted file has lost their order."""
    model = nn.Sequential(collections.OrderedDict(stem=nn.Conv2d(3, 3, 1), last=nn.Conv2d(3, 3, 1)))
    given = {
        f"{name}.{leaf}": torch.ones(shape) for name in "ab" for leaf, shape in (("bias", 3), ("weight", (3, 3, 1, 1)))
    }
    with pytest.raises(CheckpointError, match=r"4 missing .*, 4 unexpected"):
        load_foreign(model, given, where="x.pth")


def test_other_classes_are_named_and_everything_else_fits():
    given = zoo.build("resnet8-cifar", classes=7, seed=0).state_dict()
    given["linear.weight"], given["linear.bias"] = given.pop("fc.weight"), given.pop("fc.bias")
    model = zoo.build("resnet8-cifar", classes=10, seed=0)
    found = fit(model.state_dict(), given)
    assert found.other_classes == 7
    assert found.tensors.keys() == model.state_dict().keys() - {"fc.weight", "fc.bias"}
    with pytest.raises(
        CheckpointError, match=r"2 with another shape \(fc.weight 7x64, expected 10x64, .*for 7 classes$"
    ):
        load_foreign(model, given, where="x.pth")


def test_weights_of_another_model_are_listed_with_the_model_they_fit():
    given = zoo.build("resnet20-cifar", classes=10, seed=0).state_dict()
    model, before = (zoo.build("resnet8-cifar", classes=10, seed=0) for _ in range(2))
    with pytest.raises(CheckpointError) as caught:
        load_foreign(model, given, where="x.pth", name="resnet8-cifar")
    assert str(caught.value) == (
        "x.pth does not fit resnet8-cifar: 60 unexpected (layer1.1.conv1.weight, layer1.1.bn1.weight, layer1.1.bn1.bias"
        " and 57 more); these weights fit resnet20-cifar with 10 classes (all 116 tensors)"
    )
    assert all(torch.equal(tensor, before.state_dict()[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("resnet10t", "resnet10t_176_c3-f3215ab1.pth"),
        ("resnet10t", "models--timm--resnet10t.c3_in1k/model.safetensors"),
        ("regnety_002", "regnety_002.pth"),  # its constructor computes with tensors
    ],
)
def test_weights_named_after_a_model_of_timm_that_they_fit_are_listed_with_it(monkeypatch, name, where):
    monkeypatch.setattr(zoo, "names", lambda: ("resnet8-cifar",))  # trying all of them takes seconds
    given = timm.create_model(name, num_classes=7).state_dict()
    with pytest.raises(CheckpointError, match=rf"; these weights fit timm:{name} with 7 classes \(all \d+ tensors\)$"):
        load_foreign(zoo.build("resnet8-cifar", classes=10, seed=0), given, where=where)
    assert fitting_model(given, where="weights.pth") is None
    assert fitting_model(given, where="resnet50d.pth") is None  # by name alone


@pytest.mark.slow
def test_weights_that_fit_nothing_get_no_suggestion():
    assert fitting_model({"a.weight": torch.ones(2, 2)}) is None
