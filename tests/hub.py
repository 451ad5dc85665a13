"""A Hugging Face cache that holds weights, as its library lays them out."""

from pathlib import Path

import safetensors.torch
from torch import Tensor

from falconet.models import pretrained, zoo

REVISION = "a" * 40


def fill(cache: Path, name: str, *, seed: int = 77) -> dict[str, Tensor]:
    """Put random weights where a model's published ones would be; they lack what older files lack."""
    repository = cache / f"models--{pretrained.published(name).repository.replace('/', '--')}"
    snapshot = repository / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(REVISION)
    model = zoo.build(name, classes=1000, seed=seed).state_dict()
    stored = {key: tensor.contiguous() for key, tensor in model.items() if "num_batches" not in key}
    safetensors.torch.save_file(stored, snapshot / pretrained.FILE)
    return stored
