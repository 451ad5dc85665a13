"""Formulas of the TensorFlow program (inventory section 3), worked out again by hand in float64, from its own lines."""

import math
from pathlib import Path

import pytest
import torch

import pipeline_scenarios
from falconet.checkpoint import format
from falconet.config import rules
from falconet.config.commands import TrainOptions
from falconet.config.load import parse
from falconet.legacy.table import Place
from falconet.legacy.translate import translate
from falconet.optim.optimizers import set_lr
from falconet.parallel.world import World
from falconet.train.phase import begin

SMALL = "--generated-data --iterations 8 --dataset imagenet --model-size 10 --image-size 32 --precision 32.32"
HERE = "--device cpu --threads 1 --dataloader-workers 0"
UPDATES = 3


def run_of(line, **place):
    """The run that a line of the program comes to, and its state before the first update."""
    translation = translate("tf1:train.py", line.split(), place=Place(**place))
    argv = [word for setting in translation.settings for word in setting.argv()]
    run = pipeline_scenarios.run_of(World(device=torch.device("cpu")), " ".join([*argv, *HERE.split()]))
    return run, begin(run)


def gradients(state):
    """Made-up gradients of some updates by name, of sizes that differ."""
    noise = torch.Generator().manual_seed(1)
    return [
        {name: torch.randn(w.shape, generator=noise) * 0.1 * (update + 1) for name, w in state.model.named_parameters()}
        for update in range(UPDATES)
    ]


def weights(state):
    return {name: weight.detach().double() for name, weight in state.model.named_parameters()}


def moved(state, *, rates, scale):
    """Our weights after updates with gradients of a loss times `scale`."""
    state.optimizer.scale = torch.tensor(scale)
    for number, (grads, rate) in enumerate(zip(gradients(state), rates, strict=True)):
        for name, weight in state.model.named_parameters():
            weight.grad = grads[name] * scale
        state.optimizer.at(number)
        set_lr(state.optimizer, rate)
        state.optimizer.step()
    return weights(state)


def is_norm(name):
    return "bn" in name or "downsample.1" in name


def assert_same(found, expected):
    for name, values in expected.items():
        torch.testing.assert_close(
            found[name], values, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


RATES = [0.1, 0.4, 0.05]  # a rate that changes: where it stands in the formula matters


@pytest.mark.run
def test_a_scaled_loss_with_momentum_divides_the_rate_and_multiplies_the_decay():
    """3.3: gradients stay scaled, the rate is divided, the decay multiplied. 3.5: beta and gamma are spared."""
    line = f"{SMALL} --optimiser momentum --momentum 0.8 --loss-scaling 128 --weight-decay 0.01 --base-learning-rate -9"
    _, state = run_of(line)
    mine, scale, velocity = weights(state), 128.0, {}
    for grads, rate in zip(gradients(state), RATES, strict=True):
        for name, w in mine.items():
            decay = 0.0 if is_norm(name) else 0.01 * scale  # the dense bias is decayed
            velocity[name] = 0.8 * velocity.get(name, 0.0) + grads[name].double() * scale + decay * w
            mine[name] = w - rate / scale * velocity[name]
    assert_same(moved(state, rates=RATES, scale=scale), mine)


@pytest.mark.run
def test_rmsprop_starts_at_one_with_epsilon_inside_the_root():
    """3.5: v += (g^2 - v)(1 - rho); m = mu m + lr g / sqrt(v + eps); w -= m; rho is 1 - 2**-10 x 4 x 3 x 2."""
    line = f"{SMALL} --optimiser RMSprop --abs-learning-rate 0.1 --rmsprop-base-decay-exp -10 --weight-decay 0.01"
    run, state = run_of(f"{line} --batch-size 4 --gradient-accumulation-count 3 --replicas 2")
    rho = 1 - 2.0**-10 * 4 * 3 * 2
    assert run.options.optimizer.rmsprop_decay == rho
    mine = weights(state)
    squares, momenta = {name: torch.ones_like(w) for name, w in mine.items()}, dict.fromkeys(mine, 0.0)
    for grads, rate in zip(gradients(state), RATES, strict=True):
        for name, w in mine.items():
            g = grads[name].double() + (0.0 if is_norm(name) else 0.01) * w
            squares[name] = squares[name] + (g**2 - squares[name]) * (1 - rho)
            momenta[name] = 0.9 * momenta[name] + rate * g / (squares[name] + 0.001).sqrt()
            mine[name] = w - momenta[name]
    assert_same(moved(state, rates=RATES, scale=128.0), mine)


@pytest.mark.run
@pytest.mark.parametrize("skips", ["beta gamma bias", "b2/0 fc1", "beta"])
def test_lars_scales_and_decays_what_no_fragment_of_the_skip_list_names(skips):
    """3.5: trust = eeta |w| / (|g| + wd |w| + eps), 1 if a norm is 0; the rest has plain momentum, and no decay."""
    line = (
        f"{SMALL} --optimiser LARS --abs-learning-rate 4 --lars-weight-decay 0.01 --lars-eeta 0.02 --lars-epsilon 0.1"
    )
    _, state = run_of(f"{line} --lars-skip-list {skips}")
    skipped = {  # by hand, in our names
        "beta gamma bias": lambda name: is_norm(name) or name == "fc.bias",
        "b2/0 fc1": lambda name: name.startswith(("layer2.0.", "fc.")),
        "beta": lambda name: is_norm(name) and name.endswith("bias"),
    }[skips]
    mine = weights(state)
    velocity = dict.fromkeys(mine, 0.0)
    for grads, rate in zip(gradients(state), RATES, strict=True):
        for name, w in mine.items():
            g, trust = grads[name].double(), 1.0
            if not skipped(name):
                size = w.norm()
                trust = 0.02 * size / (g.norm() + 0.01 * size + 0.1) if size > 0 else 1.0
                g = g + 0.01 * w
            velocity[name] = 0.9 * velocity[name] + rate * trust * g
            mine[name] = w - velocity[name]
    assert_same(moved(state, rates=RATES, scale=128.0), mine)


def polynomial(update, *, peak, total, warm):
    if update <= warm:
        return update * peak / warm
    end = 0.01 * peak
    return (peak - end) * (1 - (update - warm) / (total - warm)) ** 1.5 + end


def stepped(update, *, peak, total, warm):
    rate = peak * 0.5 ** sum(update >= int(share * total) for share in (0.25, 0.5, 0.9))
    return rate * update / warm if update < warm else rate


def exponential(update, *, peak, total, warm):
    rate = peak * 0.9 ** math.floor(update * 30 / total)
    return rate * update / warm if update < warm else rate


def cosine(update, *, peak, total, warm):
    rate = peak * 0.5 * (1 + math.cos(math.pi * update / total))
    return rate * update / warm if update < warm else rate


SCHEDULES = {
    "polynomial_decay_lr --poly-lr-decay-power 1.5 --poly-lr-end-ratio 0.01": polynomial,
    "stepped --learning-rate-decay 0.5 --learning-rate-schedule 0.25,0.5,0.9": stepped,
    "exponential --lr-decay-rate 0.9 --lr-drops 30": exponential,
    "cosine": cosine,
}
TWO_WORKERS = '{"cluster":{"worker":["a:1","b:1"]},"task":{"type":"worker","index":0}}'


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_rate_of_every_update_matches_the_closed_forms(schedule):
    """3.4: 2**x times micro-batch x accumulation x replicas x workers, warm-up, and the schedules' closed forms."""
    shape = "--batch-size 4 --gradient-accumulation-count 8000 --replicas 2 --distributed"  # 10 updates an epoch
    line = f"--generated-data --dataset imagenet --image-size 32 --epochs 40 --base-learning-rate -11 {shape}"
    translation = translate(
        "tf1:train.py",
        f"{line} --lr-schedule {schedule} --warmup-epochs 5".split(),
        place=Place(environment={"TF_CONFIG": TWO_WORKERS}),
    )
    argv = [word for setting in translation.settings for word in setting.argv()]
    plan = pipeline_scenarios.run_of(World(device=torch.device("cpu")), " ".join([*argv, *HERE.split()])).plan
    batch = 4 * 8000 * 2 * 2
    assert (plan.global_batch, plan.updates) == (batch, 40 * (1_281_167 // batch))
    known = {"peak": 2.0**-11 * batch, "total": plan.updates, "warm": plan.updates * 5 // 40}
    found = [plan.lr(update) for update in range(plan.updates)]
    assert found == pytest.approx([SCHEDULES[schedule](update, **known) for update in range(plan.updates)])


AVERAGED = {  # what is saved: the checkpoints, by epochs, of the averages of the last 1 and 2
    "--epochs 4 --ckpts-per-epoch 1": {"1": [3, 4], "2": [2, 3, 4]},
    "--epochs 4 --ckpts-per-epoch 2": {"1": [3, 3.5, 4], "2": [2, 2.5, 3, 3.5, 4]},
    "--epochs 5 --epochs-per-ckpt 2": {"1": [4, 5], "2": [4, 5]},
}


@pytest.mark.parametrize(("line", "expected"), AVERAGED.items())
def test_averages_of_the_last_epochs_are_named_by_them_and_include_the_checkpoint_at_their_start(
    falconet, line, expected
):
    """3.8: the mean of checkpoints whose epoch is at least final - N, in ckpt/weight_avg_N_<n>."""
    asked = f"--generated-data --dataset cifar-10 --model-size 8 --batch-size 2 --no-validation {line}"
    translation = translate("tf1:train.py", [*asked.split(), "--weight-avg-N", "1", "2"])
    argv = " ".join(translation.argv())
    answer = falconet(f"{argv} --iterations 4 --image-size 16 --run-dir r --device cpu --threads 1", "tensorflow")
    assert answer.code == 0, answer.err
    made = {
        path.name.removeprefix("weight_avg_N_"): format.read_manifest(path).content["averaged"]["of"]
        for path in Path("r/checkpoints").glob("weight_avg_*")
    }
    assert made == {name: [f"ckpt-{round(4 * epoch)}" for epoch in epochs] for name, epochs in expected.items()}


BATCH_NORM = "--generated-data --model resnet --dataset"
STABLE = {  # whether batch norm's variance takes one pass
    f"{BATCH_NORM} cifar-10 --model-size 8": True,
    f"{BATCH_NORM} cifar-10 --model-size 8 --stable-norm": False,
    f"{BATCH_NORM} imagenet --model-size 50": False,  # group norm
    f"{BATCH_NORM} imagenet --model-size 50 --batch-norm": True,
    f"{BATCH_NORM} imagenet --model-size 50 --batch-norm --stable-norm": False,
    f"{BATCH_NORM} imagenet --model-size 50 --batch-norm --replicas 2 --BN-span 2": False,
    "--generated-data --dataset imagenet --model resnext --model-size 101 --batch-norm": False,
    "--generated-data --dataset imagenet --model efficientnet --model-size B0 --batch-norm": False,
    "--generated-data --dataset imagenet --model squeezenet": False,
}


@pytest.mark.parametrize(("line", "one_pass"), STABLE.items())
def test_batch_norms_variance_takes_one_pass_unless_stable(line, one_pass):
    options = parse(TrainOptions, translate("tf1:train.py", line.split()).settings).options
    assert options.model.disable_stable_batchnorm is one_pass
    rules.check(options)


def test_replicas_with_the_same_seed_drop_the_same():
    line = f"{BATCH_NORM} cifar-10 --model-size 8 --replicas 2 --identical-replica-seeding"
    translation = translate("tf1:train.py", line.split())
    assert parse(TrainOptions, translation.settings).options.parallel.identical_replica_seeding
    assert not translation.notes


THREADS = {  # command, requests or batches: 10,000 images, 4 at once
    "": ("bench infer", {"iterations": "2500", "seconds": "3"}),
    "--num-inference-thread 1 --repeat 2": ("bench infer", {"iterations": "2500", "repeat": "2", "seconds": "3"}),
    "--num-inference-thread 3": ("bench serve", {"iterations": "834", "clients": "3"}),
    "--num-inference-thread 3 --repeat 2": ("bench serve", {"iterations": "1667", "clients": "3"}),
}


@pytest.mark.parametrize("typed", THREADS)
def test_several_inference_threads_become_clients_of_a_server(typed):
    command, expected = THREADS[typed]
    line = f"{BATCH_NORM} cifar-10 --model-size 8 --batch-size 4 {typed}"
    translation = translate("tf1:inference_embedded.py", line.split())
    found = {setting.option: " ".join(setting.values) for setting in translation.settings}
    assert translation.command == command
    assert {name: found.get(name) for name in expected} == expected
    assert "batchnorm-momentum" not in found
