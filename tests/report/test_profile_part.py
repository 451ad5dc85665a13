"""The report's part about a profile: its numbers, which update they are of, and that a hostile one is only text."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from falconet.report.pages.profile import profile_part, read_profile, timed
from falconet.report.pages.run_page import page
from falconet.report.run_files import PROFILE, Layer, read_run
from report_runs import profile, write_run

ATTACK = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"


def words(html):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html))


def part(**more):
    return profile_part(read_profile(profile(**more)))


def test_bars_have_milliseconds_and_shares():
    found = words(part())
    assert "convolution, forward 6 ms 60.0 % norm 2 ms 20.0 % idle 2 ms 20.0 %" in found
    assert re.findall(r'<i style="width:([\d.]+)%', part()) == ["100.00", "33.33", "33.33"]


def test_kernels_have_calls_time_share_and_kind():
    assert "sm90_xmma_fprop convolution, forward 2 6.000 60.0" in words(part())
    assert "7 more kernels take less time each." in words(part())


def test_layers_have_time_and_memory_of_both_passes():
    found = words(part())
    assert "conv1 Conv2d 1.000 2.500 70.0 1.00 2.00" in found
    assert "bn1 + act1 FusedNorm 0.500 1.000 30.0 0.00 0.00" in found
    assert "An update has 4 micro-batches." in found
    assert "In no layer: optimizer 0.75 ms." in found


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["layer1.0.bn1"], "layer1.0.bn1"),
        (["bn1", "act1"], "bn1 + act1"),
        (["layer1.0.bn3", "layer1.0.downsample.1", "layer1.0.act3"], "layer1.0: bn3 + downsample.1 + act3"),
        (["layer1.0.bn3", "layer1.01.act3"], "layer1.0.bn3 + layer1.01.act3"),
        (["layer1.0.bn3", "act"], "layer1.0.bn3 + act"),
    ],
)
def test_layers_that_run_as_one_have_short_names(names, shown):
    row = {"names": names, "kind": "FusedNorm", "forward": 1, "backward": 1, "kept": 1, "made": 1}
    assert f" {shown} FusedNorm " in words(part(layers={"rows": [row]}))


def test_the_names_of_torchs_kernels_are_short():
    name = "void at::native::(anonymous namespace)::max_pool_forward_nhwc<c10::Half>"
    kernels = [{"name": name, "kind": "pooling", "calls": 1, "milliseconds": 1}]
    assert " max_pool_forward_nhwc&lt;c10::Half&gt; pooling " in words(part(kernels=kernels))


def test_the_memory_has_its_peak_and_phases():
    html = part()
    assert "Peak 3 GiB, 4 ms after its start, in conv1, backward. 1 GiB were allocated before." in words(html)
    assert re.findall(r'<span class="(\w+)" style="left:([\d.]+)%;width:([\d.]+)%', html) == [
        ("forward", "0.00", "50.00"),
        ("backward", "50.00", "37.50"),
        ("optimizer", "87.50", "12.50"),
    ]
    # The path is as high as the bytes: 100 is the bottom, and the top is 8 % above the peak.
    heights = [100 * (1 - gib / (3 * 1.08)) for gib in (1, 2, 3, 1)]
    drawn = [float(y) for y in re.findall(r"L[\d.]+ ([\d.]+)", re.search(r'<path d="([^"]*)"', html)[1])]
    assert drawn[:-1] == pytest.approx([height for height in heights for _ in range(2)], abs=1e-3)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, "the mean over updates 5 to 6, captured as CUDA graphs like all later ones, 10 ms each."),
        ({}, "Layers and memory are those of update 3, made without a graph, because a captured one does not show"),
        ({"captured": False}, "the mean over updates 5 to 6, 10 ms each. Layers and memory are those of update 3. "),
        ({"traced": 1, "last": 1}, "the mean over update 1,"),
        ({"what": "batch"}, "Times are those of one batch: the mean over 2 batches,"),
        ({"processes": 8}, "All of it is from the first of 8 processes."),
        ({"device": "cpu"}, "Where the time goes: operators on the CPU"),
    ],
)
def test_the_part_states_what_was_profiled(more, expected):
    assert expected in words(part(**more)) + " "


def test_a_profile_without_layers_or_memory_has_the_rest():
    html = part(layers=None, memory=None)
    assert "Costliest kernels" in html
    assert "by layer" not in html
    assert "Memory over" not in html


def test_the_table_of_layers_has_the_time_of_an_update():
    layers = [Layer(name=name, kind="x", parameters=0) for name in ("conv1", "bn1", "act1", "fc")]
    found = timed(layers, read_profile(profile()))
    assert [layer.milliseconds for layer in found] == [3.5, 1.5, None, None]
    assert timed(layers, None) == layers


def test_a_run_shows_its_profile_and_a_run_without_one_does_not(tmp_path):
    folder = write_run(tmp_path / "run")
    without = page([read_run(folder)])
    assert "r0-profile" not in without
    assert "ms per update" not in without
    (folder / PROFILE).write_text(json.dumps(profile()))
    html = page([read_run(folder)])
    assert '<a href="#r0-profile">Profile</a>' in html
    assert '<section id="r0-profile"><h2>Profile</h2>' in html
    assert "ms per update" in html


def test_two_runs_have_a_profile_each(tmp_path):
    folders = [write_run(tmp_path / name) for name in ("a", "b")]
    for folder in folders:
        (folder / PROFILE).write_text(json.dumps(profile()))
    html = page([read_run(folder) for folder in folders])
    assert [f'id="r{number}-profile"' in html for number in (0, 1, 2)] == [True, True, False]


def test_whatever_a_profile_states_is_text():
    rows = [{"names": [ATTACK], "kind": ATTACK, "forward": 1, "backward": 1, "kept": 1, "made": 1}]
    memory = profile()["memory"] | {"peak_layers": [ATTACK], "phases": [[ATTACK, 0, 1]]}
    html = part(
        what=ATTACK,
        kinds=[{"kind": ATTACK, "calls": 1, "milliseconds": 1}],
        kernels=[{"name": ATTACK, "kind": ATTACK, "calls": 1, "milliseconds": 1}],
        layers={"rows": rows, "rest": {ATTACK: 3.0}},
        memory=memory,
    )
    assert "<script" not in html
    assert "<img" not in html
    assert "&lt;script&gt;" in html


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(1e308),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(list(profile())), inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*profile()]), JSON), st.sampled_from(["layers", "memory"]), st.text(), JSON)
def test_no_profile_breaks_the_page(changed, part_of, key, value):
    content = profile(**changed)
    if isinstance(content[part_of], dict):
        content[part_of] = {**content[part_of], key: value, **dict.fromkeys([*content[part_of]][:3], value)}
    profile_part(read_profile(content)).encode()
