"""Divided optimizer state: another place in memory, the same update, the same checkpoint."""

import gloo
import numpy as np
import pytest
from replica_scenarios import alone, several_sharded, sharded

RULES = ("sgd", "sgd_combined", "adamw", "rmsprop_tf", "lars")


@pytest.mark.parametrize("size", [2, 3])
def test_divided_state_gives_the_update_and_the_checkpoint_of_whole_state(size, tmp_path):
    accumulation = {2: 2, 3: 1}[size]
    calls = [(rule, accumulation, str(tmp_path / f"{size}-{rule}")) for rule in RULES]
    results = gloo.in_world(size, several_sharded, calls)
    for number, rule in enumerate(RULES):
        whole, held_whole, _ = alone(sharded, rule, 1, str(tmp_path / f"1-{rule}"))
        parts = [result[number] for result in results]
        assert len({digest for _, _, digest in parts}) == 1, "the replicas drifted apart"
        assert sum(held for _, held, _ in parts) == held_whole
        assert max(held for _, held, _ in parts) <= held_whole / size * 1.1
        found = parts[0][0]
        assert found.keys() == whole.keys()
        for name, expected in whole.items():
            assert found[name].dtype == expected.dtype, name
            difference = np.linalg.norm(found[name] - expected) / max(np.linalg.norm(expected), 1e-6)
            assert difference < 5e-5, (rule, name, difference)
