"""A Triton repository that was exported, with the scores that torch computes for the same model."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from falconet.config.commands import ServeOptions
from falconet.config.load import read_line
from falconet.export.triton_repository import MODELS
from falconet.infer.classifier import open_classifier


class Exported(NamedTuple):
    """A repository with one model."""

    name: str  # of the model
    models: Path
    pixels: np.ndarray  # N x S x S x 3
    scores: np.ndarray  # of the same model in torch, N x classes


def exported_model(folder, *, images, line):
    """What is in a folder, and the model that a command line names, normalised and computed without the predictor."""
    settings = read_line(ServeOptions, [*line.split(), "--device", "cpu"])
    classifier, _ = open_classifier(ServeOptions, settings, lambda _: None)
    about = classifier.preprocessing
    side = about.image_size
    pixels = np.random.default_rng(0).integers(0, 256, (images, side, side, 3), dtype=np.uint8)
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (about.mean, about.std))
    with torch.inference_mode():
        values = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
        scores = classifier.model.eval()((values - mean) / std).numpy()
    return Exported(classifier.served_name, folder / MODELS, pixels, scores)
