"""Every named config builds and does one update."""

import pytest

from falconet.config.named import all_configs


@pytest.mark.parametrize("name", all_configs())
def test_a_named_config_does_one_update_on_generated_data(falconet, name):
    answer = falconet(
        f"train --config {name} --data generated --image-size 32 --classes 10 --iterations 1 --micro-batch-size 4"
        " --epoch 1 --warmup-epoch 0 --device cpu --threads 1 --validation-mode after"
    )
    assert answer.code == 0, answer.err


def test_the_list_has_a_line_for_each(falconet):
    lines = falconet("configs").out.splitlines()
    assert [line.split()[0] for line in lines] == list(all_configs())
