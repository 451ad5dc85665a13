"""Memory that does not suffice: a warning where that is predicted, and the micro-batch that does, found by trying."""

from pathlib import Path

import pytest
import torch

from falconet.checkpoint import format
from falconet.evaluation import evaluate
from falconet.train import build, fitting, memory, step
from layouts import class_folders
from phases import built
from runs import assert_bitwise, begin, finish, stop_at
from tiny import TINY

HOST = RuntimeError("[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you")
AUTO = f"{TINY} --micro-batch-size auto"


@pytest.mark.parametrize("most", range(1, 25))
@pytest.mark.parametrize("total", [1, 7, 24])
def test_the_largest_that_fits_is_found_in_few_trials(most, total):
    tried = []

    def fits(size):
        tried.append(size)
        return size <= most

    sizes = fitting.divisors(total)
    assert fitting.largest(sizes, fits) == max(size for size in sizes if size <= most)
    assert len(tried) <= 1 + len(sizes).bit_length()
    assert tried[0] == total


def test_nothing_is_found_where_nothing_fits():
    assert fitting.largest([2, 3, 6], lambda _: False) is None
    assert fitting.largest([], lambda _: True) is None


def test_divisors_leave_partners_for_mixing():
    assert fitting.divisors(12) == [1, 2, 3, 4, 6, 12]
    assert fitting.divisors(12, least=3) == [3, 4, 6, 12]


def test_too_little_memory_is_a_warning_before_the_first_update(falconet, monkeypatch):
    phase = built(TINY)
    need = phase.placement.need(phase.model)
    monkeypatch.setattr(memory, "capacity", lambda *_: need.of(5))
    answer = falconet(f"train {TINY} --run-dir r")
    assert answer.code == 0
    (line,) = [line for line in answer.out.splitlines() if "warning" in line]
    assert line.startswith(
        "warning: predicted to need 0.00 GiB, but cpu has 0.00 GiB; --micro-batch-size 4 --gradient-"
    )
    assert line.endswith("--gradient-accumulation 2 is predicted to need 0.00 GiB")
    assert answer.out.index(line) < answer.out.index("train loss")


def test_a_plan_warns_of_too_little_memory(falconet, monkeypatch):
    phase = built(TINY)
    need = phase.placement.need(phase.model)
    monkeypatch.setattr(memory, "capacity", lambda *_: need.of(5))
    answer = falconet(f"train {TINY} --plan")
    assert "; --micro-batch-size 4 --gradient-accumulation 2 is predicted to need 0.00 GiB\n" in answer.out
    assert "warning" not in falconet(f"train {TINY} --micro-batch-size 4 --gradient-accumulation 2 --plan").out


STAGED = f"{TINY} --model resnet20-cifar --image-size 64 --gradient-accumulation 16 --pipeline-splits layer2/0"


@pytest.mark.parametrize(
    ("schedule", "size", "advice"),
    [
        ("interleaved", 8, "--pipeline-schedule interleaved is"),
        ("interleaved", 4, "--pipeline-schedule interleaved --micro-batch-size 4 --gradient-accumulation 32 is"),
        ("interleaved", 1, "--pipeline-schedule interleaved --micro-batch-size 1 --gradient-accumulation 128 is"),
    ],
)
def test_stages_that_do_not_fit_are_a_warning_with_what_does(falconet, monkeypatch, schedule, size, advice):
    phase = built(f"{STAGED} --device cpu")
    monkeypatch.setattr(memory, "capacity", lambda *_: sum(phase.placement.needs(size, schedule)) // 2 + 1)
    answer = falconet(f"train {STAGED} --plan")
    (line,) = [line for line in answer.out.splitlines() if "warning" in line]
    assert line.startswith("warning: a stage on average is predicted to need 0.0")
    assert f" GiB for each; {advice}" in line


def test_stages_of_which_nothing_fits_are_a_warning(falconet, monkeypatch):
    monkeypatch.setattr(memory, "capacity", lambda *_: 1000)
    answer = falconet(f"train {STAGED} --plan")
    assert "for each; expected more --pipeline-splits, fewer images per update or smaller ones\n" in answer.out


def test_stages_that_fit_are_not_mentioned(falconet, monkeypatch):
    phase = built(f"{STAGED} --device cpu")
    monkeypatch.setattr(memory, "capacity", lambda *_: sum(phase.placement.needs(8, "grouped")) // 2 + 1)
    assert "warning" not in falconet(f"train {STAGED} --plan").out


def test_enough_memory_is_not_mentioned(falconet):
    assert "predicted" not in falconet(f"train {TINY} --run-dir r").out


@pytest.fixture
def limited(monkeypatch):
    """Let micro-batches of more than some images fail, as if the host had no more memory; returns those tried."""

    def limit(most, error=HOST):
        plain, tried = step.LocalStep.__call__, []

        def until_short(self, batches, *, update, lr):
            tried.append(len(batches[0].labels))
            if tried[-1] > most:
                raise error
            return plain(self, batches, update=update, lr=lr)

        monkeypatch.setattr(step.LocalStep, "__call__", until_short)
        return tried

    return limit


def test_auto_is_the_largest_that_fits_and_trains_as_if_it_had_been_typed(falconet, limited, tmp_path):
    limited(20)
    answer = falconet(f"train {AUTO} --run-dir found")
    assert answer.code == 0, answer.err
    assert "global batch 64 = micro-batch 16 x accumulation 4 x replicas 1\n" in answer.out
    note = "note: --micro-batch-size auto: 16, the largest that fits, for updates of 64 images per replica\n"
    assert note in answer.out
    assert falconet(f"train {TINY} --micro-batch-size 16 --gradient-accumulation 4 --run-dir typed").code == 0
    assert_bitwise(tmp_path / "found", tmp_path / "typed")
    stored = format.verify(format.checkpoints_in(tmp_path / "found")[-1]).config
    assert (stored["micro-batch-size"]["value"], stored["gradient-accumulation"]["value"]) == ("16", "4")


@pytest.mark.parametrize("extra", ["", "--gradient-accumulation 2"])
def test_the_config_of_a_run_states_the_updates_that_auto_found(falconet, limited, extra):
    limited(20)
    assert falconet(f"train {AUTO} {extra} --run-dir r").code == 0
    stated, found = Path("r/config.yaml").read_text(), 8 if extra else 4
    assert "micro-batch-size: 16  # trials of --micro-batch-size auto\n" in stated
    assert f"gradient-accumulation: {found}  # trials of --micro-batch-size auto\n" in stated
    again = falconet("train --config r/config.yaml --plan")
    assert f"global batch {16 * found} = micro-batch 16 x accumulation {found} x replicas 1\n" in again.out


def test_auto_fills_updates_of_several_micro_batches(falconet, limited):
    limited(1000)
    answer = falconet(f"train {AUTO} --gradient-accumulation 2 --plan")
    assert "global batch 128 = micro-batch 128 x accumulation 1 x replicas 1\n" in answer.out


def test_auto_suits_fewer_photos_than_the_config_for_photos_expects(falconet, limited, tmp_path):
    photos = class_folders(tmp_path / "photos")
    limited(100)
    line = f"train {photos} --model resnet8-cifar --pretrained none --image-size 32 --epoch 1 --run-dir r"
    answer = falconet(f"{line} --micro-batch-size auto")
    assert answer.code == 0, answer.err
    assert "fits, for updates of 8 images" in answer.out


def test_auto_keeps_the_updates_of_a_config(falconet, limited):
    Path("mine.yaml").write_text("micro-batch-size: 24\ngradient-accumulation: 2\n")
    limited(20)
    answer = falconet(
        f"train {TINY.replace('--micro-batch-size 8', '')} --config mine.yaml --micro-batch-size auto --plan"
    )
    assert answer.code == 0, answer.err
    assert "global batch 48 = micro-batch 16 x accumulation 3 x replicas 1\n" in answer.out


def test_a_run_that_continues_keeps_what_it_found(falconet, limited, monkeypatch, tmp_path):
    limited(20)
    assert falconet(f"train {AUTO} --run-dir straight").code == 0
    with monkeypatch.context() as stopping:
        stop_at(stopping, 5)
        assert falconet(f"train {AUTO} --run-dir r").code == 130
    tried = limited(1000)  # more would fit now
    answer = falconet("restore --checkpoint-input-path r")
    assert answer.code == 0, answer.err
    assert set(tried) == {16}
    assert_bitwise(tmp_path / "r", tmp_path / "straight")


def test_resume_with_the_same_line_tries_nothing(falconet, limited, monkeypatch):
    limited(20)
    with monkeypatch.context() as stopping:
        stop_at(stopping, 3)
        assert falconet(f"train {AUTO} --run-dir r --resume").code == 130
    tried = limited(1000)
    answer = falconet(f"train {AUTO} --run-dir r --resume")
    assert answer.code == 0, answer.err
    assert set(tried) == {16}
    assert "trying" not in answer.out


def test_restore_can_look_for_another_micro_batch(falconet, limited):
    limited(1000)
    assert falconet(f"train {TINY} --run-dir r").code == 0
    limited(3)
    answer = falconet("restore --checkpoint-input-path r --epoch 3 --micro-batch-size auto")
    assert answer.code == 0, answer.err
    assert "global batch 8 = micro-batch 2 x accumulation 4 x replicas 1\n" in answer.out


def test_auto_refuses_where_nothing_fits(falconet, limited):
    limited(1)
    answer = falconet(f"train {AUTO} --cutmix-lambda-low 0.3 --cutmix-lambda-high 0.9 --run-dir r")
    assert (answer.code, answer.err) == (2, "falconet train: --micro-batch-size auto: not even 2 fits on cpu\n")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--pipeline-splits layer2/0",
            "--micro-batch-size auto: does not work with --pipeline-splits; expected a number",
        ),
        (
            "--half-res-training --fine-tune-epoch 1 --weight-avg-strategy mean --fine-tune-gradient-accumulation 2",
            "--micro-batch-size auto: --fine-tune-gradient-accumulation needs --fine-tune-micro-batch-size as well",
        ),
    ],
)
def test_auto_says_what_it_cannot_do(falconet, line, message):
    answer = falconet(f"train {AUTO} {line}")
    assert (answer.code, answer.err) == (2, f"falconet train: {message}\n")


def test_both_phases_of_a_half_resolution_run_are_tried(falconet, limited):
    tried = limited(20)
    line = "--half-res-training --fine-tune-epoch 1 --weight-avg-strategy mean --data generated --image-size 32"
    answer = falconet(f"train {AUTO} {line} --plan")
    assert answer.code == 0, answer.err
    assert [tried.count(size) for size in (64, 32, 16)] == [1, 1, 4]  # two updates of both phases
    assert answer.out.count("micro-batch 16 x accumulation 4") == 2


@pytest.mark.parametrize("at", [0, 5], ids=["first update", "later update"])
def test_out_of_memory_names_the_micro_batch_that_fits(falconet, monkeypatch, at):
    plain = step.LocalStep.__call__

    def until_short(self, batches, *, update, lr):
        if len(batches[0].labels) > 3 and update >= at:
            raise HOST
        return plain(self, batches, update=update, lr=lr)

    monkeypatch.setattr(step.LocalStep, "__call__", until_short)
    answer = falconet(f"train {TINY} --run-dir r")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    newest = "the newest checkpoint is r/checkpoints/resnet8-cifar_generated_1" if at else "there is no checkpoint yet"
    fitting = 4 if at else 2  # a trial makes updates 0 and 1, which only the run from its first update cannot make
    assert answer.err == (
        f"falconet train: out of memory on the host; --micro-batch-size {fitting} --gradient-accumulation"
        f" {8 // fitting} fits here, with the same updates of 8 images; {newest}\n"
    )
    if at:
        continued = f"restore --checkpoint-input-path r --micro-batch-size {fitting - 2} --gradient-accumulation 4"
        assert falconet(continued).code == 0


FINE_TUNED = (
    f"{TINY} --half-res-training --weight-avg-strategy mean --fine-tune-epoch 1 --fine-tune-micro-batch-size 8"
    " --fine-tune-gradient-accumulation 1 --fine-tune-lr 0.1"
)


@pytest.fixture
def limited_at(monkeypatch):
    """Let micro-batches of more than some images of one size fail."""

    def limit(side, most):
        plain = step.LocalStep.__call__

        def until_short(self, batches, *, update, lr):
            if batches[0].images.shape[-1] == side and len(batches[0].labels) > most:
                raise HOST
            return plain(self, batches, update=update, lr=lr)

        monkeypatch.setattr(step.LocalStep, "__call__", until_short)

    return limit


def test_out_of_memory_in_the_fine_tuning_names_its_own_options(falconet, limited_at):
    limited_at(16, 3)
    answer = falconet(f"train {FINE_TUNED} --run-dir r")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    fitting = "--fine-tune-micro-batch-size 2 --fine-tune-gradient-accumulation 4"
    assert f"; {fitting} fits here, with the same updates of 8 images; the newest checkpoint is r/" in answer.err
    continued = falconet(f"restore r {fitting}")
    assert continued.code == 0, continued.err
    assert "global batch 8 = micro-batch 2 x accumulation 4 x replicas 1\n" in continued.out


def test_out_of_memory_that_nothing_avoids_in_the_fine_tuning_names_its_options_too(falconet, limited_at):
    limited_at(16, 0)
    answer = falconet(f"train {FINE_TUNED} --run-dir r")
    assert "; expected a smaller --fine-tune-micro-batch-size with more --fine-tune-gradient-accumulation" in answer.err


@pytest.mark.parametrize("given", ["--fine-tune-micro-batch-size 8", "--fine-tune-gradient-accumulation 1"])
def test_no_micro_batch_is_named_that_would_change_the_updates_of_the_fine_tuning(falconet, limited_at, given):
    limited_at(12, 3)
    both = "--fine-tune-micro-batch-size 8 --fine-tune-gradient-accumulation 1"
    fits = "--micro-batch-size 2 --gradient-accumulation 4 fits here"
    assert fits in falconet(f"train {FINE_TUNED} --run-dir both").err
    answer = falconet(f"train {FINE_TUNED.replace(both, given)} --run-dir one")
    assert answer.err.startswith("falconet train: out of memory on the host; expected a smaller --micro-batch-size")


def test_out_of_memory_that_no_micro_batch_avoids_says_what_else_helps(falconet, limited):
    limited(0)
    answer = falconet(f"train {TINY} --run-dir r")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert answer.err.endswith(
        "; expected a smaller --micro-batch-size with more --gradient-accumulation, a smaller --validation-batch-size,"
        " or --enable-recompute; there is no checkpoint yet\n"
    )


def test_a_trial_includes_the_validation(falconet, monkeypatch):
    plain = fitting._validate

    def too_large(built, state, batch):
        if batch > 2:
            raise HOST
        plain(built, state, batch)

    def fail(*_, **__):
        raise HOST

    monkeypatch.setattr(fitting, "_validate", too_large)
    monkeypatch.setattr(evaluate, "evaluate", fail)
    answer = falconet(f"train {TINY} --run-dir r")
    assert "; --micro-batch-size 2 --gradient-accumulation 4 fits here" in answer.err


def test_nothing_of_a_failed_run_is_left_when_others_are_tried(falconet, monkeypatch):
    """Weights of the failed run would take the memory that the trials need."""
    import weakref

    built, kept, alive = build.BuiltPhase.new_state, [], []

    def new_state(self):
        alive.append(sum(each() is not None for each in kept))
        made = built(self)
        kept.append(weakref.ref(made.model))
        return made

    def fail(self, batches, *, update, lr):
        raise MemoryError

    monkeypatch.setattr(build.BuiltPhase, "new_state", new_state)
    monkeypatch.setattr(step.LocalStep, "__call__", fail)
    falconet(f"train {TINY} --run-dir r")
    assert len(alive) >= 3
    assert set(alive) == {0}


@pytest.mark.dist
def test_replicas_agree_on_a_micro_batch(tmp_path):
    """One of two processes has less memory."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK'):\n"
        "    most = 40 if os.environ['RANK'] == '0' else 10\n"
        "    from falconet.train import step\n"
        "    plain = step.LocalStep.__call__\n"
        "    def until_short(self, batches, *, update, lr):\n"
        "        if len(batches[0].labels) > most:\n"
        "            raise MemoryError\n"
        "        return plain(self, batches, update=update, lr=lr)\n"
        "    step.LocalStep.__call__ = until_short\n"
    )
    line = f"train {AUTO} --replicas 2 --epoch 1 --run-dir r"
    code, out, err = finish(begin(line, tmp_path, variables={"PYTHONPATH": str(tmp_path)}))
    assert code == 0, err
    assert "global batch 128 = micro-batch 8 x accumulation 8 x replicas 2\n" in out


# On a GPU.

GPU = "--data generated --image-size 224 --classes 1000 --iterations 2 --epoch 1 --warmup-epoch 0 --device cuda"


@pytest.fixture
def small_device():
    """A device with as much memory as is asked for, GiB."""
    whole = torch.cuda.get_device_properties(0).total_memory

    def limit(gigabytes):
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(gigabytes * 2**30 / whole)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)
    fitting.release(torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32.32", "16.32 --loss-scaling 128"])
def test_a_small_device_gets_the_micro_batch_that_fits(falconet, small_device, precision):
    line = f"train {GPU} --model resnet50 --precision {precision}"
    small_device(4)
    answer = falconet(f"{line} --micro-batch-size 128 --run-dir r")
    assert (answer.code, answer.err.count("\n")) == (2, 1), answer.err
    assert "out of memory on the device" in answer.err
    fitting = answer.err.partition("); ")[2].partition(" fits here")[0]
    again = falconet(f"{line} {fitting} --run-dir again")
    assert again.code == 0, again.err
    found = falconet(f"{line} --micro-batch-size auto --gradient-accumulation 2 --run-dir found")
    assert found.code == 0, found.err
    size = int(found.out.partition("= micro-batch ")[2].split()[0])
    assert int(fitting.split()[1]) <= size < 128  # the line is careful: it must be right without a second trial


def test_the_run_folder_of_a_run_that_did_not_fit_is_usable(falconet, limited):
    limited(3)
    assert falconet(f"train {TINY} --run-dir r").code == 2
    answer = falconet(f"train {TINY} --micro-batch-size 2 --gradient-accumulation 4 --run-dir r")
    assert answer.code == 0, answer.err
    assert Path("r/summary.json").exists()
