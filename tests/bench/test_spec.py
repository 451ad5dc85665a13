"""Specs: the originals' files are read as they are, and every mistake is one line."""

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


def test_the_training_benchmarks_of_the_original_are_read():
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


def test_the_inference_benchmarks_of_the_original_make_28_variants():
    found = read_spec(DATA / "inference_benchmarks.yml")
    assert len(found) == 11
    assert sum(len(benchmark.variants) for benchmark in found) == 8 * 2 + 3 * 4
    assert found[0].variants == ({"batchsize": "1"}, {"batchsize": "64"})


def test_merges_parameters_and_values_as_they_are_spelled(spec):
    first, second = read_spec(spec(MERGED))
    assert first.command == "falconet train --micro-batch-size {batchsize}"
    assert len(first.variants) == 4
    assert first.variants[1] == {"batchsize": "1", "kind": "b"}
    assert second.variants == ({"batch": "3", "accumulation": "150"}, {"batch": "4", "accumulation": "120"})
    assert first.environment == {"LEVEL": "010"}
    assert first.timeout == 90.0
    assert first.derived == {"each": "{throughput} / 4"}
    assert first.output == (("samples/sec", "throughput"), ("each", "each"))


def test_of_two_entries_of_one_name_the_last_counts_and_it_is_said(spec):
    """As in a file of the TensorFlow original."""
    path = spec(ENTRY + "b: {cmd: falconet train}\na:\n  cmd: falconet validate\n")
    found = {benchmark.name: benchmark for benchmark in read_spec(path)}
    assert [*found] == ["a", "b"]
    assert found["a"].command == "falconet validate"
    assert found["a"].notes == (f"a is in {path} more than once; the last one counts",)
    assert found["b"].notes == ()


def test_a_command_runs_in_its_location_or_beside_the_spec_where_there_is_no_such_folder(spec, tmp_path):
    path = spec(MERGED)
    assert read_spec(path)[0].folder == tmp_path
    assert read_spec(path)[0].notes == (f"location inner is not a folder here; commands run in {tmp_path}",)
    (tmp_path / "inner").mkdir()
    assert read_spec(path)[0].folder == tmp_path / "inner"
    assert read_spec(path)[0].notes == ()


def test_a_link_to_a_spec_runs_where_the_link_is(spec, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here/benchmarks.yml").symlink_to(spec(ENTRY))
    assert read_spec(tmp_path / "here/benchmarks.yml")[0].folder == tmp_path / "here"


def test_an_output_that_nothing_measures_is_said(spec):
    shown = "  output: [[a, throughput], [b, n], [c, los], [d, loss]]\n"
    rest = "  data: {loss: {regexp: '(x)'}}\n  parameters: {n: '1,2'}\n"
    (found,) = read_spec(spec(ENTRY + shown + rest))
    assert found.notes == ("a: output: c: nothing measures los; did you mean 'loss'?",)


def test_all_are_chosen_but_those_that_train_to_an_accuracy(spec):
    every = read_spec(spec(MERGED))
    assert [one.name for one in select(every, [], convergence=False)] == ["first_train_gen"]
    assert [one.name for one in select(every, [], convergence=True)] == ["first_train_gen", "second_conv"]
    assert [one.name for one in select(every, ["second_conv"], convergence=False)] == ["second_conv"]


def test_a_missing_name_is_answered_with_the_nearest(spec):
    with pytest.raises(ConfigError, match="no benchmark is named 'first_train'; did you mean 'first_train_gen'"):
        select(read_spec(spec(MERGED)), ["first_train"], convergence=False)


ENTRY = "a:\n  cmd: falconet train\n"
MISTAKES = {
    "a: [": "is not YAML",
    "- a\n- b\n": "wanted a mapping of benchmark names",
    "just text": "wanted a mapping of benchmark names",
    "x_options: {cmd: y}\n": "has no benchmark in it",
    "a: text\n": "a: wanted a mapping with a cmd",
    "a:\n  description: x\n": "a: has no cmd",
    "a:\n  cmd: ''\n": "a: cmd: wanted text",
    ENTRY + "  comand: x\n": "a: unknown key 'comand'; did you mean 'cmd'",
    ENTRY + "  zzzzzz: x\n": "a: unknown key 'zzzzzz'; wanted description, cmd",
    ENTRY + "  cmd: again\n": "'cmd' is there twice",
    ENTRY + "  data: x\n": "a: data: wanted a mapping",
    ENTRY + "  data: {loss: {regex: x}}\n": "a: data: loss: wanted a regexp",
    ENTRY + "  data: {loss: {regexp: '(x'}}\n": "a: data: loss: regexp: ",
    ENTRY + "  data: {loss: {regexp: 'x'}}\n": "has 0 groups, wanted one",
    ENTRY + "  data: {loss: {regexp: '(x)', skip: -1}}\n": "skip: got '-1'",
    ENTRY + "  data: {loss: {regexp: '(x)', reduction_type: max}}\n": "reduction_type: got 'max', wanted mean, final",
    ENTRY + "  parameters: 3\n": "a: parameters: wanted a mapping",
    ENTRY + "  parameters: [[a, b], [1]]\n": "a row has 1 value, wanted 2",
    ENTRY + "  derived: {x: {expr: 'import os'}}\n": "derived: x: expr: 'import os' is not arithmetic",
    ENTRY + "  derived: {x: {expr: '{los} / 2'}}\n  data: {loss: {regexp: '(x)'}}\n": (
        "derived: x: nothing is known of {los}; did you mean 'loss'"
    ),
    ENTRY + "  data: {loss: {regexp: '(x)', skip: \u00b2}}\n": "skip: got '\u00b2'",
    ENTRY + "  output: [a]\n": "a: output: wanted a list of pairs",
    ENTRY + "  timeout: soon\n": "a: timeout: got 'soon', wanted a number of seconds",
}


@pytest.mark.parametrize(("text", "message"), MISTAKES.items())
def test_a_mistake_is_told_in_one_line_with_its_place(spec, text, message):
    path = spec(text)
    with pytest.raises(ConfigError) as error:
        read_spec(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_one_name_in_two_files_is_a_mistake(tmp_path):
    every = []
    for name in ("x.yml", "y.yml"):
        (tmp_path / name).write_text(ENTRY)
        every += read_spec(tmp_path / name)
    with pytest.raises(ConfigError, match=r"y\.yml: 'a' is also in .*x\.yml"):
        select(every, [], convergence=False)


def test_a_file_that_is_not_there_and_a_spec_that_is_not_built_in(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_spec(find_spec(str(tmp_path / "none.yml")))
    with pytest.raises(ConfigError, match="no spec is named 'smokee'; did you mean 'smoke'"):
        find_spec("smokee")


@pytest.mark.parametrize("name", builtin_specs())
def test_a_built_in_spec_is_read_and_runs_where_the_user_is(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for benchmark in read_spec(find_spec(name)):
        assert benchmark.folder == tmp_path


def test_our_specs_have_every_benchmark_of_the_original():
    for ours, theirs in (("pytorch_train", "train"), ("pytorch_inference", "inference")):
        own = {benchmark.name: benchmark for benchmark in read_spec(find_spec(ours))}
        for benchmark in read_spec(DATA / f"{theirs}_benchmarks.yml"):
            assert own[benchmark.name].variants == benchmark.variants


def test_the_example_of_the_docs_is_a_spec(spec):
    text = (Path(__file__).parents[2] / "docs/using/benchmarking.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.S)
    (found,) = read_spec(spec(example))
    assert (found.name, len(found.variants), found.timeout) == ("resnet50_gen", 2, 600.0)
    assert found.environment == {"OMP_NUM_THREADS": "4"}


HOSTILE = {
    "location: [b]": "a: location: wanted text",
    "parameters: [[[b], c], [1, 2]]": "a: parameters: wanted text",
    "parameters: {b: {c: d}}": "a: parameters: wanted text",
    "parameters: {b: []}": "a: parameters: b: got '', wanted values, each once",
    "parameters: {b: '1,1'}": "a: parameters: b: got '1,1', wanted values, each once",
    "data: {t: {regexp: [a]}}": "a: data: t: regexp: wanted text",
    "env: {b: [1]}": "a: env: b: wanted text",
    "env: {'b=c': d}": "a: env: 'b=c' is no name of a variable",
    'env: {b: "x\\0y"}': "a: env: b: wanted text",
}


@pytest.mark.parametrize(("line", "says"), HOSTILE.items())
def test_a_value_of_another_kind_is_answered_in_one_line(tmp_path, line, says):
    path = tmp_path / "spec.yml"
    path.write_text(f"a:\n  cmd: x\n  {line}\n")
    with pytest.raises(ConfigError) as caught:
        read_spec(path)
    assert str(caught.value) == f"{path}: {says}"


@pytest.mark.parametrize("text", ["[" * 2000, "a: \0"], ids=["deep", "no character of YAML"])
def test_what_yaml_itself_refuses_is_one_line(tmp_path, text):
    path = tmp_path / "spec.yml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_spec(path)
    assert "\n" not in str(caught.value)
