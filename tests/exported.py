"""A small model as a graph to export, and the parity of what a format writes."""

from dataclasses import replace

import torch
from torch import nn

from falconet.config.options import Model
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from falconet.export import checks, photos
from falconet.export.formats import FORMATS, torch_engine
from falconet.export.graph import Graph
from falconet.models.zoo import build_model

CPU, SIDE, NAMES = torch.device("cpu"), 32, ("ant", "bee", "cow")
PREPROCESSING = Preprocessing(image_size=SIDE, resize=36, mean=IMAGENET_MEAN, std=IMAGENET_STD)


def graph_of(name="resnet8-cifar", *, preprocessing=PREPROCESSING, takes_pixels=False, half=False, **options):
    """A model whose norms do something, with the statistics of noise, which a forgotten `eval` would change.

    Arbitrary statistics would make deep networks chaotic: a rounding error would grow to the size of the scores.
    """
    built = Model(model=name, **options)
    model = build_model(built, classes=len(NAMES), seed=0)
    noise = torch.Generator().manual_seed(1)
    norms = [layer for layer in model.modules() if hasattr(layer, "eps")]
    with torch.no_grad():
        for parameter in (each for layer in norms for each in layer.parameters(recurse=False)):
            parameter.uniform_(0.5, 1.5, generator=noise)  # blocks that start as zero would hide their errors
        momenta = [(layer, layer.momentum) for layer in norms if isinstance(layer, nn.BatchNorm2d)]
        for layer, _ in momenta:
            layer.momentum = None  # the plain mean
        if momenta:
            model.train()(torch.randn(16, 3, SIDE, SIDE, generator=noise))
        for layer, momentum in momenta:
            layer.momentum = momentum
    return Graph(
        name=name.replace(":", "-"),
        options=built,
        model=model.eval(),
        preprocessing=preprocessing,
        class_names=NAMES,
        takes_pixels=takes_pixels,
        half=half,
    )


def exported(graph, kind, folder):
    """The parity of what a format writes."""
    FORMATS[kind].write(graph, folder, CPU)
    engine = FORMATS[kind].open(graph, folder, CPU)
    noise = photos.noise(graph)
    few = replace(noise, pixels=noise.pixels[:8])
    ours = torch_engine(graph.module(), CPU)
    return checks.compare(graph, ours, engine, few, tolerance=checks.TOLERANCE, batch=3)
