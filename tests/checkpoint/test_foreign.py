"""Foreign weights load when they fit, and run nothing when they are hostile."""

import io
import os
import pickle
import random
import resource
import time
import zipfile

import pytest
import safetensors.torch
import torch
from torch import nn

from falconet.checkpoint.foreign import load_weights, read_weights
from falconet.errors import CheckpointError

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
    "parameters": {name: nn.Parameter(tensor) for name, tensor in weights().items()},
}


def assert_same(read):
    assert read.keys() == weights().keys()
    for name, tensor in weights().items():
        assert read[name].dtype == tensor.dtype
        assert not read[name].requires_grad
        assert torch.equal(read[name], tensor)


@pytest.mark.parametrize("case", WRAPPED)
@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".pth.tar"])
def test_weights_are_read_from_any_trainer_wrapper(tmp_path, case, suffix):
    path = tmp_path / f"w{suffix}"
    torch.save(WRAPPED[case], path)
    assert_same(read_weights(path))


def test_the_oldest_torch_files_are_read(tmp_path):
    torch.save(weights(), tmp_path / "w.pth", _use_new_zipfile_serialization=False)
    assert_same(read_weights(tmp_path / "w.pth"))


def test_safetensors_are_read(tmp_path):
    safetensors.torch.save_file(prefixed("module."), tmp_path / "w.safetensors")
    assert_same(read_weights(tmp_path / "w.safetensors"))


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
    "text": (b"<!DOCTYPE html><title>404</title>" * 100, TORN),
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
        with pytest.raises(CheckpointError, match="truncated, or not safetensors"):
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
    "missing": (without("0.bias", "1.weight", "1.bias"), "3 missing (0.bias, ...)"),
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
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(CheckpointError, match=r"bytes unpack to 200,\d+,\d+; expected at most 4 times as many$"):
        read_weights(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB
    assert time.monotonic() - begun < 5


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
