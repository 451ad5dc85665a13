"""Specs: the originals' files are read unchanged, and every mistake is one line."""

import re
from pathlib import Path

import pytest

from falconet.bench.spec import builtin_specs, find_spec, read_spec, select
from falconet.errors import ConfigError

DATA = Path(__file__).parents[1] / "data/bench"
MERGED = """
common_options: &common_options
  data:
    throughput: {regexp: 'throughput: *(.*?) samples', skip: 1}
  env: {LEVEL: 010}

first_train_gen:
  <<: *common_options
  description: one
  location: inner
  timeout: 90
  derived:
    each: {expr: '{throughput} / 4'}
  output: [[samples/sec, throughput], [each, each]]
  parameters:
    batchsize: 1,64
    kind: a,b
  cmd: >-
    falconet train
      --micro-batch-size {batchsize}

second_conv:
  <<: *common_options
  parameters:
    - [batch, accumulation]
    - [3, 150]
    - [4, 120]
  cmd: falconet train
"""


@pytest.fixture
def spec(tmp_path):
    def write(text):
        path = tmp_path / "benchmarks.yml"
        path.write_text(text)
        return path

    return write


def test_the_originals_training_spec_is_read():
    found = read_spec(DATA / "train_benchmarks.yml")
    assert [benchmark.name for benchmark in found if not benchmark.converges] == [
        "pytorch_resnet50_train_real_pod4",
        "pytorch_resnet50_train_real_pod16",
        "pytorch_efficientnet_b0_train_real_pod16",
        "pytorch_efficientnet_b4_g16_train_real_pod16",
    ]
    assert len(found) == 7
    metrics = found[0].metrics
    assert metrics["throughput"].skip == 1
    assert metrics["throughput"].pattern.findall("throughput: 123.4 samples/sec") == ["123.4"]
    assert (metrics["loss"].reduction, metrics["accuracy"].reduction) == ("final", "final")
    assert found[0].ignored == ("requirements_path", "required_apt_packages_path", "pre_run_commands")


def test_the_originals_inference_spec_has_28_variants():
    found = read_spec(DATA / "inference_benchmarks.yml")
    assert len(found) == 11
    assert sum(len(benchmark.variants) for benchmark in found) == 8 * 2 + 3 * 4
    assert found[0].variants == ({"batchsize": "1"}, {"batchsize": "64"})


def test_merges_parameters_and_scalars_are_read_as_written(spec):
    first, second = read_spec(spec(MERGED))
    assert first.command == "falconet train --micro-batch-size {batchsize}"
    assert len(first.variants) == 4
    assert first.variants[1] == {"batchsize": "1", "kind": "b"}
    assert second.variants == ({"batch": "3", "accumulation": "150"}, {"batch": "4", "accumulation": "120"})
    assert first.environment == {"LEVEL": "010"}
    assert first.timeout == 90.0
    assert first.derived == {"each": "{throughput} / 4"}
    assert first.output == (("samples/sec", "throughput"), ("each", "each"))


def test_the_last_of_two_entries_of_one_name_is_used_with_a_note(spec):
    """As in a file of the TensorFlow original."""
    path = spec(ENTRY + "b: {cmd: falconet train}\na:\n  cmd: falconet validate\n")
    found = {benchmark.name: benchmark for benchmark in read_spec(path)}
    assert [*found] == ["a", "b"]
    assert found["a"].command == "falconet validate"
    assert found["a"].notes == (f"a is in {path} more than once; using the last",)
    assert found["b"].notes == ()


def test_a_command_runs_in_its_location_or_else_beside_the_spec(spec, tmp_path):
    path = spec(MERGED)
    assert read_spec(path)[0].folder == tmp_path
    assert read_spec(path)[0].notes == (f"location inner is not a folder here; running in {tmp_path}",)
    (tmp_path / "inner").mkdir()
    assert read_spec(path)[0].folder == tmp_path / "inner"
    assert read_spec(path)[0].notes == ()


def test_a_link_to_a_spec_runs_where_the_link_is(spec, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here/benchmarks.yml").symlink_to(spec(ENTRY))
    assert read_spec(tmp_path / "here/benchmarks.yml")[0].folder == tmp_path / "here"


def test_an_output_that_is_not_measured_is_noted(spec):
    shown = "  output: [[a, throughput], [b, n], [c, los], [d, loss]]\n"
    rest = "  data: {loss: {regexp: '(x)'}}\n  parameters: {n: '1,2'}\n"
    (found,) = read_spec(spec(ENTRY + shown + rest))
    assert found.notes == ("a: output: c: no such metric as los; did you mean 'loss'?",)


def test_benchmarks_that_train_to_an_accuracy_must_be_asked_for(spec):
    every = read_spec(spec(MERGED))
    assert [one.name for one in select(every, [], convergence=False)] == ["first_train_gen"]
    assert [one.name for one in select(every, [], convergence=True)] == ["first_train_gen", "second_conv"]
    assert [one.name for one in select(every, ["second_conv"], convergence=False)] == ["second_conv"]


def test_an_unknown_benchmark_gets_a_suggestion(spec):
    with pytest.raises(ConfigError, match="there is no benchmark 'first_train'; did you mean 'first_train_gen'"):
        select(read_spec(spec(MERGED)), ["first_train"], convergence=False)


ENTRY = "a:\n  cmd: falconet train\n"
MISTAKES = {
    "a: [": "is not YAML",
    "- a\n- b\n": "expected a mapping of benchmark names",
    "just text": "expected a mapping of benchmark names",
    "x_options: {cmd: y}\n": "has no benchmarks",
    "a: text\n": "a: expected a mapping with a cmd",
    "a:\n  description: x\n": "a: has no cmd",
    "a:\n  cmd: ''\n": "a: cmd: expected text",
    ENTRY + "  comand: x\n": "a: unknown key 'comand'; did you mean 'cmd'",
    ENTRY + "  zzzzzz: x\n": "a: unknown key 'zzzzzz'; expected description, cmd",
    ENTRY + "  cmd: again\n": "'cmd' is given twice",
    ENTRY + "  data: x\n": "a: data: expected a mapping",
    ENTRY + "  data: {loss: {regex: x}}\n": "a: data: loss: expected a regexp",
    ENTRY + "  data: {loss: {regexp: '(x'}}\n": "a: data: loss: regexp: ",
    ENTRY + "  data: {loss: {regexp: 'x'}}\n": "has 0 groups, expected one",
    ENTRY + "  data: {loss: {regexp: '(x)', skip: -1}}\n": "skip: got '-1'",
    ENTRY + "  data: {loss: {regexp: '(x)', reduction_type: max}}\n": "reduction_type: got 'max', expected mean, final",
    ENTRY + "  parameters: 3\n": "a: parameters: expected a mapping",
    ENTRY + "  parameters: [[a, b], [1]]\n": "a row has 1 value, expected 2",
    ENTRY + "  derived: {x: {expr: 'import os'}}\n": "derived: x: expr: 'import os' is not arithmetic",
    ENTRY + "  derived: {x: {expr: '{los} / 2'}}\n  data: {loss: {regexp: '(x)'}}\n": (
        "derived: x: unknown name {los}; did you mean 'loss'"
    ),
    ENTRY + "  data: {loss: {regexp: '(x)', skip: \u00b2}}\n": "skip: got '\u00b2'",
    ENTRY + "  output: [a]\n": "a: output: expected a list of pairs",
    ENTRY + "  timeout: soon\n": "a: timeout: got 'soon', expected a number of seconds",
}


@pytest.mark.parametrize(("text", "message"), MISTAKES.items())
def test_a_mistake_in_a_spec_is_reported_in_one_line_with_its_place(spec, text, message):
    path = spec(text)
    with pytest.raises(ConfigError) as error:
        read_spec(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_one_name_in_two_files_is_refused(tmp_path):
    every = []
    for name in ("x.yml", "y.yml"):
        (tmp_path / name).write_text(ENTRY)
        every += read_spec(tmp_path / name)
    with pytest.raises(ConfigError, match=r"y\.yml: 'a' is also defined in .*x\.yml"):
        select(every, [], convergence=False)


def test_a_missing_file_and_an_unknown_spec_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_spec(find_spec(str(tmp_path / "none.yml")))
    with pytest.raises(ConfigError, match="there is no spec 'smokee'; did you mean 'smoke'"):
        find_spec("smokee")


@pytest.mark.parametrize("name", builtin_specs())
def test_a_built_in_spec_runs_in_the_current_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for benchmark in read_spec(find_spec(name)):
        assert benchmark.folder == tmp_path


def test_our_specs_have_every_benchmark_of_the_originals():
    for ours, theirs in (("pytorch_train", "train"), ("pytorch_inference", "inference")):
        own = {benchmark.name: benchmark for benchmark in read_spec(find_spec(ours))}
        for benchmark in read_spec(DATA / f"{theirs}_benchmarks.yml"):
            assert own[benchmark.name].variants == benchmark.variants


def test_the_example_in_the_docs_is_a_valid_spec(spec):
    text = (Path(__file__).parents[2] / "docs/using/benchmarking.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.S)
    (found,) = read_spec(spec(example))
    assert (found.name, len(found.variants), found.timeout) == ("resnet50_gen", 2, 600.0)
    assert found.environment == {"OMP_NUM_THREADS": "4"}


HOSTILE = {
    "location: [b]": "a: location: expected text",
    "parameters: [[[b], c], [1, 2]]": "a: parameters: expected text",
    "parameters: {b: {c: d}}": "a: parameters: expected text",
    "parameters: {b: []}": "a: parameters: b: got '', expected distinct values",
    "parameters: {b: '1,1'}": "a: parameters: b: got '1,1', expected distinct values",
    "data: {t: {regexp: [a]}}": "a: data: t: regexp: expected text",
    "env: {b: [1]}": "a: env: b: expected text",
    "env: {'b=c': d}": "a: env: 'b=c' is not a valid variable name",
    'env: {b: "x\\0y"}': "a: env: b: expected text",
}


@pytest.mark.parametrize(("line", "says"), HOSTILE.items())
def test_a_value_of_the_wrong_type_is_refused_in_one_line(tmp_path, line, says):
    path = tmp_path / "spec.yml"
    path.write_text(f"a:\n  cmd: x\n  {line}\n")
    with pytest.raises(ConfigError) as caught:
        read_spec(path)
    assert str(caught.value) == f"{path}: {says}"


@pytest.mark.run
@pytest.mark.parametrize("text", ["[" * 2000, "a: \0"], ids=["deep", "no character of YAML"])
def test_invalid_yaml_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "spec.yml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_spec(path)
    assert "\n" not in str(caught.value)
