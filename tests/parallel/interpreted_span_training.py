"""Run by test_batchnorm in processes of their own: Triton must be imported with its interpreter from the start."""

import json
import sys

import torch

from falconet.models.fused import fusion, layers
from falconet.parallel.batchnorm import span_batchnorm
from falconet.parallel.collectives import join
from falconet.parallel.data_parallel import digest
from falconet.parallel.environment import Place
from falconet.parallel.grid import divide
from falconet.train.build import build_replicas
from replica_scenarios import images, model_of, own_part, stepper


def trained(world, *, fits):
    """The state after two updates of the fused model, whose layers are fused where an input `fits`."""
    layers.fits = fits
    model = model_of("batch").to(memory_format=torch.channels_last)
    span_batchnorm(model, divide(world, stages=1), span=2)
    step = stepper(model, "sgd", build_replicas(model, world, bucket=0.05, sharded=False))
    step.forward = fusion.fuse(model).model
    for update in range(2):
        step(own_part(images(update), world, 2), update=update, lr=0.05)
    return model


def on_a_cpu(y, *norms):
    return y.is_contiguous(memory_format=torch.channels_last) and all(map(layers.can_fuse, norms))


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, port = map(int, sys.argv[1:])
    place = Place(launcher="test", rank=rank, size=2, local_rank=rank, local_size=2, port=port)
    with join(place, torch.device("cpu"), timeout=120) as world:
        fused, plain = trained(world, fits=on_a_cpu), trained(world, fits=lambda *_: False)
        pairs = zip(fused.state_dict().values(), plain.state_dict().values(), strict=True)
        off = [((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-3)).item() for a, b in pairs]
        print(json.dumps({"digests": [digest(fused), digest(plain)], "off": max(off)}))
