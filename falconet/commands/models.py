"""`falconet models`: list the models that can be trained, and their published weights."""

import torch

from falconet.config.commands import ModelsOptions
from falconet.config.help import wrapped
from falconet.config.load import Loaded
from falconet.models import pretrained, zoo
from falconet.report.console import Screen

NOTES = (
    "parameters: with 1000 classes, 10 for the CIFAR networks. timm:NAME is any other model of timm, with or without a"
    " tag. --pretrained starts from published weights, which timm names like this."
)


def run(loaded: Loaded[ModelsOptions]) -> int:
    del loaded
    screen = Screen()
    screen.line(f"{'model':22}{'parameters':>12}{'input':>12}  published weights")
    for name in zoo.names():
        classes = 10 if name.endswith("-cifar") else 1000
        with torch.device("meta"):
            parameters = zoo.count_parameters(zoo.build(name, classes=classes, seed=0))
        size = zoo.image_size(name)
        screen.line(f"{name:22}{parameters:>12,}{f'{size} x {size}':>12}  {pretrained.TAGS.get(name, '')}".rstrip())
    for line in wrapped(NOTES):
        screen.line(line)
    return 0
