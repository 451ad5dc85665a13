"""A small model as a graph to export, and the parity of what a format writes."""

from dataclasses import replace

import torch
from torch import nn

from falconet.config.options import Model
from falconet.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from falconet.export import checks
from falconet.export.formats import FORMATS, torch_engine
from falconet.export.graph import Graph
from falconet.models.zoo import build_model

CPU, SIDE, NAMES = torch.device("cpu"), 32, ("ant", "bee", "cow")
PREPROCESSING = Preprocessing(image_size=SIDE, resize=36, mean=IMAGENET_MEAN, std=IMAGENET_STD)


def graph_of(name="resnet8-cifar", *, preprocessing=PREPROCESSING, takes_pixels=False, half=False, **options):
    """A model with norms that do something, and statistics that a forgotten `eval` would change."""
    built = Model(model=name, **options)
    model = build_model(built, classes=len(NAMES), seed=0)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in model.modules():
            for parameter in layer.parameters(recurse=False) if hasattr(layer, "eps") else ():
                parameter.uniform_(0.5, 1.5, generator=noise)  # blocks that start as zero would hide their errors
            if isinstance(layer, nn.BatchNorm2d):
                layer.running_mean.normal_(0, 0.1, generator=noise)
                layer.running_var.uniform_(0.5, 1.5, generator=noise)
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
    photos = checks.noise(graph)
    photos = replace(photos, pixels=photos.pixels[:8])
    ours = torch_engine(graph.module(), CPU)
    return checks.compare(graph, ours, engine, photos, tolerance=checks.TOLERANCE, batch=3)
