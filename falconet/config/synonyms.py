"""Other programs' names for our options, choices and commands, tried before edit distance, which knows only letters.

The names are those of timm, torchvision's references, Ultralytics, fastai, Lightning and Keras.
"""

from collections.abc import Collection

# By option: what to type here instead, without the first dashes; a list's first word that the command has is suggested.
OPTIONS = {
    **dict.fromkeys(("learning-rate", "lr0", "base-lr", "lr-base", "lr-max", "max-lr"), "lr"),
    **dict.fromkeys(("batch-size", "batch", "bs", "b", "train-batch-size"), "micro-batch-size"),
    **dict.fromkeys(("val-batch-size", "test-batch-size", "eval-batch-size"), "validation-batch-size"),
    **dict.fromkeys(("epochs", "num-epochs", "max-epochs", "n-epochs", "nepochs"), "epoch"),
    **dict.fromkeys(("steps", "max-steps", "iters", "max-iters", "num-steps"), "updates"),
    **dict.fromkeys(("workers", "num-workers", "j", "dataloader-num-workers"), "dataloader-workers"),
    **dict.fromkeys(("imgsz", "img-size", "input-size", "img", "resolution", "size", "crop-size"), "image-size"),
    **dict.fromkeys(("arch", "a", "model-name", "backbone", "net", "network", "m"), "model"),
    **dict.fromkeys(("num-classes", "nb-classes", "nc"), "classes"),
    **dict.fromkeys(("data-path", "dataset-path", "root", "train-dir", "dataset-dir", "source", "path"), "data-dir"),
    **dict.fromkeys(("images", "image-dir", "img-dir", "photos", "folder"), "data-dir"),
    **dict.fromkeys(("cache", "cache-images"), "dataset-cache"),
    **dict.fromkeys(("drop", "dropout", "drop-rate"), "efficientnet-dropout"),
    **dict.fromkeys(("drop-path", "drop-path-rate"), "efficientnet-drop-path"),
    **dict.fromkeys(("lrf", "lr-end", "lr-final"), "lr-end-ratio"),
    **dict.fromkeys(("dataset", "ds"), "data"),
    **dict.fromkeys(
        ("val", "split", "val-split", "validation-split", "valid-pct", "test-size", "val-pct"), "val-fraction"
    ),
    **dict.fromkeys(("opt", "optim"), "optimizer"),
    **dict.fromkeys(("wd", "l2"), "weight-decay"),
    **dict.fromkeys(("sched", "scheduler", "lr-scheduler", "schedule"), "lr-schedule"),
    **dict.fromkeys(("cos-lr", "cosine"), "lr-schedule cosine"),
    **dict.fromkeys(("warmup", "warmup-epochs", "lr-warmup-epochs"), "warmup-epoch"),
    **dict.fromkeys(("patience", "early-stop", "early-stopping-patience"), "early-stopping"),
    **dict.fromkeys(("lr-find", "lr-finder", "auto-lr-find"), "lr auto"),
    **dict.fromkeys(("smoothing", "label-smooth"), "label-smoothing"),
    **dict.fromkeys(("mixup", "mix-up"), "mixup-alpha"),
    **dict.fromkeys(("cutmix", "cutmix-alpha"), "cutmix-lambda-high"),
    **dict.fromkeys(("aa", "auto-augment-policy", "ra-magnitude", "randaugment", "rand-augment"), "auto-augment"),
    **dict.fromkeys(("ra", "rand", "rand-aug", "ta", "ta-wide", "trivialaugment", "autoaugment"), "auto-augment"),
    **dict.fromkeys(("reprob", "random-erase", "erasing", "re-prob"), "random-erasing"),
    **dict.fromkeys(("vflip", "flipud", "flip-ud"), "vertical-flip"),
    **dict.fromkeys(("hflip", "fliplr", "flip-lr", "augmentation", "augmentations"), "augment"),
    **dict.fromkeys(("colour-jitter", "jitter", "hsv-h"), "color-jitter"),
    **dict.fromkeys(("ra-reps", "ra-sampler", "aug-repeats"), "repeated-augmentation"),
    **dict.fromkeys(("model-ema", "ema", "model-ema-decay", "ema-decay"), "ema-half-life"),
    **dict.fromkeys(("class-weight", "weighted-loss"), "class-weights"),
    **dict.fromkeys(("freeze-layers", "freeze-at"), "freeze"),
    **dict.fromkeys(("freeze-backbone", "linear-probe"), "freeze backbone"),
    **dict.fromkeys(("freeze-epochs", "unfreeze"), "unfreeze-after"),
    **dict.fromkeys(("llrd", "layerwise-lr-decay", "lr-layer-decay"), "layer-decay"),
    **dict.fromkeys(("pretrained-path", "from-pretrained", "pretrain", "finetune", "imagenet-weights"), "pretrained"),
    **dict.fromkeys(("weights", "load"), "pretrained"),
    **dict.fromkeys(("ckpt", "ckpt-path"), "init-path"),
    **dict.fromkeys(("amp", "fp16", "half", "mixed-precision"), "precision 16.32"),
    **dict.fromkeys(("bf16", "bfloat16"), "precision bf16.32"),
    **dict.fromkeys(("fp32", "float32"), "precision 32.32"),
    **dict.fromkeys(("gpus", "num-gpus", "nproc-per-node", "nproc", "world-size"), "replicas"),
    **dict.fromkeys(("no-cuda", "cpu"), "device cpu"),
    **dict.fromkeys(("gpu", "cuda", "use-cuda"), "device cuda"),
    **dict.fromkeys(
        ("accum", "grad-accum-steps", "accumulate-grad-batches", "accumulation-steps"), "gradient-accumulation"
    ),
    **dict.fromkeys(
        ("output", "output-dir", "save-dir", "save", "project", "out", "log-dir", "logdir", "experiment"), "run-dir"
    ),
    **dict.fromkeys(("name", "exp-name", "run-name", "tag"), "name-suffix"),
    **dict.fromkeys(("random-seed", "random-state", "manual-seed"), "seed"),
    **dict.fromkeys(("save-period", "save-freq", "checkpoint-every"), "checkpoint-save-freq"),
    **dict.fromkeys(("print-freq", "log-every", "log-freq"), "log-interval"),
    **dict.fromkeys(("topk", "top-k", "k"), "top"),
    **dict.fromkeys(("sync-bn", "syncbn"), "batchnorm-span"),
    **dict.fromkeys(("grad-checkpointing", "gradient-checkpointing"), "enable-recompute"),
    **dict.fromkeys(("dry-run", "show-config"), "plan"),
    **dict.fromkeys(("progressive-resizing", "progressive-resize", "res-schedule"), "resolution-schedule"),
    **dict.fromkeys(("dataset-fraction", "fraction", "limit-train-batches"), "dataset-percentage"),
}
# Options for a second folder, beside the one to train on; here both are in one.
DIVIDED = (
    *("val-dir", "valid-dir", "validation-dir", "test-dir", "val-path", "validation-path", "test-path"),
    *("val-folder", "val-data", "validation-data", "test-data"),
)
CHOICES = {
    "device": {"gpu": "cuda", "mps": "cpu"},
    "precision": {
        **{"fp16": "16.16", "float16": "16.16", "half": "16.16", "amp": "16.32", "mixed": "16.32", "16": "16.32"},
        **{"fp32": "32.32", "float32": "32.32", "single": "32.32", "32": "32.32"},
        **{"bf16": "bf16.32", "bfloat16": "bf16.32"},
    },
    "auto-augment": {
        **dict.fromkeys(("rand", "ra", "randaug"), "randaugment"),
        **dict.fromkeys(("ta", "ta_wide", "trivial", "trivialaugmentwide"), "trivialaugment"),
        **dict.fromkeys(("aa", "v0", "original"), "autoaugment"),
    },
    "optimizer": {"adam": "adamw", "momentum": "sgd"},
    "data": {"cifar-10": "cifar10", "cifar-100": "cifar100", "image_folder": "folder", "imagefolder": "folder"},
}
REASONS = {("device", "mps"): "Apple's GPUs are not supported"}  # why another program's choice does not exist here
COMMANDS = {
    "version": "--version",
    **dict.fromkeys(("fit", "finetune", "fine-tune", "learn", "classify"), "train"),
    **dict.fromkeys(("val", "eval", "evaluate", "test"), "validate"),
    **dict.fromkeys(("infer", "inference", "classify-image"), "predict"),
    **dict.fromkeys(("convert", "onnx"), "export"),
    **dict.fromkeys(("resume", "continue"), "restore"),
    **dict.fromkeys(("server", "deploy"), "serve"),
    **dict.fromkeys(("benchmark", "profile"), "bench"),
    **dict.fromkeys(("tune", "sweep", "optuna"), "search"),
    **dict.fromkeys(("info", "env", "checks", "settings", "env-info"), "doctor"),
    **dict.fromkeys(("list", "list-models", "zoo"), "models"),
    **dict.fromkeys(("cfg", "config", "recipes"), "configs"),
}


def advice(name: str, options: Collection[str]) -> str | None:
    """Advice, in words, on what replaces another program's option."""
    if name.lower() in DIVIDED and {"epoch", "data-dir"} <= {*options}:
        return "expected one folder with train/ and val/ in it, as in `falconet train FOLDER`"
    meant = option_meant(name, options)
    return f"did you mean '{meant}'?" if meant else None


def option_meant(name: str, options: Collection[str]) -> str | None:
    """What to type, with dashes, for another program's option; None if the command lacks it."""
    meant = "data-dir" if name.lower() in DIVIDED else OPTIONS.get(name.lower())
    return f"--{meant}" if meant and meant.split()[0] in options else None


def choice_meant(option: str, value: str) -> str | None:
    """The choice that another program's word stands for."""
    if option == "device" and value.replace(",", "").removeprefix("cuda:").isdigit():
        return "cuda"  # CUDA_VISIBLE_DEVICES says which
    words, word = CHOICES.get(option, {}), value.lower()
    return words.get(word) or words.get(word.partition("-")[0])  # timm's rand-m9-mstd0.5


def why_not(option: str, value: str) -> str:
    """Why another program's choice does not exist here, for the end of a message."""
    reason = REASONS.get((option, value.lower()))
    return f"; {reason}" if reason else ""


def command_meant(name: str, commands: Collection[str]) -> str | None:
    """The command that another program's word stands for."""
    meant = COMMANDS.get(name.lower())
    return meant if meant in commands or meant == "--version" else None
