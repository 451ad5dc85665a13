"""Facts that the TensorFlow program derives from several options: data, model, batch, epochs, learning rate."""

import json
import re
from typing import Any

from falconet.errors import ConfigError
from falconet.legacy.table import Values, power_of_two, short
from falconet.legacy.tensorflow_variables import Network, find, weights_of

IMAGES = {"imagenet": 1_281_167, "cifar-10": 50_000, "cifar-100": 50_000}
CLASSES = {"imagenet": 1000, "cifar-10": 10, "cifar-100": 100}
FAMILIES = ("resnet", "resnext", "efficientnet", "squeezenet")
IMAGENET_SIZES = {
    "resnet": ("10", "14", "18", "26", "34", "50", "101", "152"),
    "resnext": ("14", "26", "50", "101", "152"),
    "efficientnet": tuple(f"B{size}" for size in range(8)),
    "squeezenet": ("1.0",),
}
CIFAR_BOTTLENECKS = ("11", "29", "38", "47", "56", "65")  # of the two with 56 layers, the original used this one
CIFAR_SIZES = {
    "resnet": ("8", "14", "20", "32", "44", "110", *CIFAR_BOTTLENECKS),
    "resnext": CIFAR_BOTTLENECKS,
    "efficientnet": ("CIFAR", *IMAGENET_SIZES["efficientnet"]),
    "squeezenet": ("1.0",),
}


EFFICIENTNETS = {  # width, depth, image size, dropout, after Tan and Le
    "B0": ("1.0", "1.0", "224", "0.2"),
    "B1": ("1.0", "1.1", "240", "0.2"),
    "B2": ("1.1", "1.2", "260", "0.3"),
    "B3": ("1.2", "1.4", "300", "0.3"),
    "B4": ("1.4", "1.8", "380", "0.4"),
    "B5": ("1.6", "2.2", "456", "0.4"),
    "B6": ("1.8", "2.6", "528", "0.5"),
    "B7": ("2.0", "3.1", "600", "0.5"),
    "CIFAR": ("0.5", "1.0", "32", "0.0"),
}


def family(old: Values) -> str:
    name = old.text("--model").lower()
    if name not in FAMILIES:
        raise ConfigError(f"--model: got '{name}', expected {', '.join(FAMILIES)}")
    return name


def dataset(old: Values) -> str:
    """The dataset: given, or guessed from the folder's name."""
    if old.has("--dataset"):
        return old.text("--dataset")
    folder = data_dir(old) or ""
    found = re.search(r"imagenet|cifar-?100|cifar-?10", folder.lower())
    if not found:
        where = f"cannot be guessed from --data-dir {folder}" if folder else "required, or --data-dir"
        raise ConfigError(f"--dataset: {where}; expected imagenet, cifar-10 or cifar-100")
    return {"cifar10": "cifar-10", "cifar100": "cifar-100"}.get(found[0], found[0])


def data_dir(old: Values) -> str | None:
    return old.text("--data-dir") if old.has("--data-dir") else old.place.environment.get("DATA_DIR")


def is_random(old: Values) -> bool:
    return old.flag("--generated-data") or old.flag("--synthetic-data")


def is_imagenet(old: Values) -> bool:
    return dataset(old) == "imagenet"


def size(old: Values) -> str:
    """The model's size as the program's tables spell it."""
    kind = family(old)
    if old.has("--model-size"):
        text = old.text("--model-size").upper()
        return f"B{text}" if kind == "efficientnet" and text.isdigit() else text
    defaults = {"resnet": ("18", "20"), "resnext": ("14", "11"), "efficientnet": ("B0", "B0")}
    return defaults.get(kind, ("1.0", "1.0"))[0 if is_imagenet(old) else 1]


def model(old: Values) -> str:
    """Our name of the model; an unknown size is refused with a list of the known ones."""
    kind, number = family(old), size(old)
    sizes = (IMAGENET_SIZES if is_imagenet(old) else CIFAR_SIZES)[kind]
    if number not in sizes:
        raise ConfigError(
            f"--model-size: {kind} {number} for {dataset(old)} does not exist; expected {', '.join(sizes)}"
        )
    if kind == "efficientnet":
        return f"efficientnet-{number.lower()}"
    if kind == "squeezenet":
        return kind  # for CIFAR too: the same layers at 32 pixels, as in the original
    if is_imagenet(old):
        return f"{kind}{number}"
    return "resnet56b-cifar" if (kind, number) == ("resnet", "56") else f"{kind}{number}-cifar"


def micro_batch(old: Values) -> int:
    if old.has("--batch-size"):
        return old.whole("--batch-size")
    known = {"resnet": (4, 32), "resnext": (1, 8), "efficientnet": (4, 8), "squeezenet": (2, 128)}
    return known[family(old)][0 if is_imagenet(old) else 1]


def workers(old: Values) -> int:
    """Processes that TF_CONFIG lists, each with its replicas."""
    if old.flag("--distributed") and old.place.replicas:
        raise ConfigError("--distributed: is for TF_CONFIG only; poprun started this process and sets the replicas")
    text = old.place.environment.get("TF_CONFIG", "")
    if not old.flag("--distributed") or not text:
        return 1
    try:
        content: Any = json.loads(text)
        cluster = content["cluster"]
        return max(1, len(cluster.get("chief", [])) + len(cluster.get("worker", [])))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError("TF_CONFIG: cannot be read; expected JSON with a cluster of workers") from None


def replicas(old: Values) -> int:
    """Replicas in all; a launcher's number takes precedence over the option."""
    return (old.place.replicas or old.whole("--replicas")) * workers(old)


def total_batch(old: Values) -> int:
    """Images per update, which scale the learning rate."""
    return micro_batch(old) * old.whole("--gradient-accumulation-count") * replicas(old)


def images(old: Values) -> int:
    """Training images; of ImageNet, the share that was asked for."""
    share = old.whole("--dataset-percentage-to-use") if is_imagenet(old) else 100
    return IMAGES[dataset(old)] * share // 100


def epochs(old: Values) -> float:
    if old.has("--epochs"):
        asked = old.number("--epochs")
        if asked <= 0:
            raise ConfigError(f"--epochs: got {asked:g}, expected more than 0")
        return asked
    known = (350, 300) if family(old) == "efficientnet" else (100, 160)
    return known[0 if is_imagenet(old) else 1]


def length(old: Values) -> float:
    """Epochs until training ends; --iterations, which takes precedence, are divided by those of the whole dataset."""
    return old.whole("--iterations") / updates_per_epoch(old) if old.has("--iterations") else epochs(old)


def updates(old: Values) -> int | None:
    """The length of training in updates, unless it is given in epochs."""
    return None if _is_one_epoch(old) or not old.has("--iterations") else old.whole("--iterations")


def updates_per_epoch(old: Values) -> int:
    """The updates per epoch, from the numbers of images that the program assumes."""
    if _is_one_epoch(old):
        return old.whole("--iterations")
    return max(1, images(old) // total_batch(old))


def _is_one_epoch(old: Values) -> bool:
    """Whether training is one epoch of --iterations updates, as with random data and --iterations alone."""
    return is_random(old) and old.has("--iterations") and not old.has("--epochs")


def base_exponent(old: Values) -> float:
    """The x in the learning rate, 2**x times the total batch."""
    if old.has("--base-learning-rate"):
        return old.number("--base-learning-rate")
    if not is_imagenet(old):
        return -10.0 if family(old) == "squeezenet" else -6.0
    known = _EFFICIENTNET_EXPONENTS if family(old) == "efficientnet" else _RESNET_EXPONENTS
    rule = optimiser(old)
    if rule not in known:
        raise ConfigError(f"--base-learning-rate: required with --optimiser {rule}, or --abs-learning-rate")
    return known[rule]


_RESNET_EXPONENTS = {"SGD": -8.0, "momentum": -11.0}
_EFFICIENTNET_EXPONENTS = {"SGD": -7.0, "momentum": -10.0, "RMSprop": -14.0}


def optimiser(old: Values) -> str:
    """The name as the program's code spells it; its documents write RMSProp."""
    return {"RMSProp": "RMSprop"}.get(old.text("--optimiser"), old.text("--optimiser"))


def peak(old: Values) -> float:
    """The learning rate after warm-up."""
    if old.has("--abs-learning-rate"):
        return old.number("--abs-learning-rate")
    return power_of_two("--base-learning-rate", base_exponent(old)) * total_batch(old)


def warmup(old: Values) -> float:
    """Epochs of warm-up; a training by --iterations has none unless --epochs is given too."""
    polynomial = old.text("--lr-schedule") == "polynomial_decay_lr"
    if old.has("--iterations") and not old.has("--epochs") and not polynomial:
        return 0.0
    return old.number("--warmup-epochs")


def rmsprop_decay(old: Values) -> float:
    if old.has("--rmsprop-decay"):
        return old.number("--rmsprop-decay")
    if old.has("--rmsprop-base-decay-exp"):
        exponent = old.number("--rmsprop-base-decay-exp")
    elif family(old) == "efficientnet" and is_imagenet(old):
        exponent = -14.0
    else:
        raise ConfigError("--rmsprop-decay: required with --optimiser RMSprop, or --rmsprop-base-decay-exp")
    decay = 1.0 - power_of_two("--rmsprop-base-decay-exp", exponent) * total_batch(old)
    if not 0.0 <= decay <= 1.0:
        raise ConfigError(
            f"--rmsprop-base-decay-exp: 1 - 2**{exponent:g} x {total_batch(old)} is {decay:g}, expected 0 to 1"
        )
    return decay


def weight_decay(old: Values) -> float:
    """The weight decay; LARS has its own option, whose documented default is the common one."""
    names = ("--lars-weight-decay", "--weight-decay") if optimiser(old) == "LARS" else ("--weight-decay",)
    for name in names:
        if old.has(name):
            return old.number(name)
    if not is_imagenet(old):
        return 1e-6
    return 1e-5 if family(old) == "efficientnet" else 1e-4


def smoothing(old: Values) -> float:
    """The smoothing: the original's s gives other classes s / (C - 1) each, ours r all r / C: r = s x C / (C - 1)."""
    asked = old.number("--label-smoothing")
    if not asked and family(old) == "efficientnet" and is_imagenet(old):
        asked = 0.1
    classes = CLASSES[dataset(old)]
    return asked * classes / (classes - 1)


def uses_batch_norm(old: Values) -> bool:
    both = old.flag("--batch-norm") and old.flag("--group-norm")
    if both:
        return family(old) == "efficientnet"
    if old.flag("--batch-norm") or old.flag("--group-norm"):
        return old.flag("--batch-norm")
    return not is_imagenet(old) and family(old) != "efficientnet"


def groups(old: Values) -> int:
    if old.has("--groups"):
        return old.whole("--groups")
    return 4 if family(old) == "efficientnet" else 32 if is_imagenet(old) else 16


def rounds_stochastically(old: Values) -> bool:
    """Whether rounding is stochastic, by the switch or by the choice that replaced it in SDK 2.5."""
    return not old.flag("--no-stochastic-rounding") and old.text("--stochastic-rounding") != "OFF"


def settled(old: Values) -> dict[str, object]:
    """The defaults that depend on data and model, as the program's arguments.json has them."""
    has_norm = family(old) != "squeezenet"
    return {
        "--dataset": dataset(old),
        "--data-dir": data_dir(old),
        "--model-size": size(old),
        "--batch-size": micro_batch(old),
        "--epochs": None if old.has("--iterations") else epochs(old),
        "--base-learning-rate": None if old.has("--abs-learning-rate") else base_exponent(old),
        "--weight-decay": weight_decay(old),
        "--groups": groups(old),
        "--batch-norm": old.flag("--batch-norm") or (has_norm and uses_batch_norm(old)),
        "--group-norm": old.flag("--group-norm") or (has_norm and not uses_batch_norm(old)),
        "--no-stochastic-rounding": not rounds_stochastically(old),
    }


def network(old: Values) -> Network:
    """The facts on which the names of the model's variables depend."""
    model(old)  # refuses an unknown size
    return Network(
        family=family(old),
        size=size(old),
        cifar=not is_imagenet(old) and family(old) != "efficientnet",
        batch_norm=uses_batch_norm(old),
        excites=not old.flag("--no-se"),
        proxied=old.flag("--proxy-norm"),
    )


def trained(old: Values) -> tuple[str, ...]:
    """Our names of the weights that are trained, in order, without statistics."""
    own = network(old)
    filtered = find(own, old.texts("--variable-filter")).weights if old.given("--variable-filter") else None
    weights = (name for name in weights_of(own) if "running_" not in name)
    return tuple(name for name in weights if filtered is None or name in filtered)


def defaults(old: Values) -> dict[str, str]:
    """Options whose default depends on the model and the data, for a model that exists."""
    model(old)  # refuses an unknown size
    kind, known = family(old), {"--model-size": size(old), "--batch-size": str(micro_batch(old))}
    known |= {
        "--epochs": short(epochs(old)),
        "--base-learning-rate": short(base_exponent(old)),
        "--weight-decay": short(weight_decay(old)),
        "--image-size": "224" if is_imagenet(old) else "32",
    }
    if kind != "squeezenet":
        known["--groups"] = str(groups(old))
    if kind == "resnext":
        known |= {"--convolution-groups": "32", "--group-dim": "4"}
    if kind == "efficientnet":
        width, depth, side, dropout = EFFICIENTNETS[size(old)]
        known |= {"--width-coefficient": width, "--depth-coefficient": depth, "--dropout-rate": dropout}
        known |= {"--group-dim": "1", "--expand-ratio": "6", "--depth-divisor": "8", "--top-width": "1280"}
        if is_imagenet(old):
            known |= {"--image-size": side, "--label-smoothing": "0.1", "--rmsprop-base-decay-exp": "-14"}
    return known
