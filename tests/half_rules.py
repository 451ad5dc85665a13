"""Every half-precision update rule, for tests that compare its kernel with plain torch."""

from falconet.optim.half_optimizers import HalfAdamW, HalfLars, HalfRMSprop, HalfRMSpropTF, HalfSGD

MAKERS = {
    "descent": lambda groups, r: HalfSGD(groups, lr=0.1, momentum=0.0, rounding=r),
    "momentum descent": lambda groups, r: HalfSGD(groups, lr=0.1, momentum=0.9, rounding=r),
    "lars": lambda groups, r: HalfLars(groups, lr=0.1, momentum=0.9, trust=0.01, eps=1e-6, rounding=r),
    "rmsprop": lambda groups, r: HalfRMSpropTF(groups, lr=0.1, alpha=0.9, eps=1e-3, momentum=0.0, rounding=r),
    "momentum rmsprop": lambda groups, r: HalfRMSpropTF(groups, lr=0.1, alpha=0.9, eps=1e-3, momentum=0.9, rounding=r),
    "root rmsprop": lambda groups, r: HalfRMSprop(groups, lr=0.1, alpha=0.9, eps=1e-8, momentum=0.0, rounding=r),
    "momentum root rmsprop": lambda groups, r: HalfRMSprop(
        groups, lr=0.1, alpha=0.9, eps=1e-8, momentum=0.9, rounding=r
    ),
    "adamw": lambda groups, r: HalfAdamW(groups, lr=0.1, eps=1e-8, rounding=r),
}


def optimizer_of(name, model, rounding):
    """The optimizer of a list of parameters; matrices are decayed and adapt, vectors do neither."""
    matrices, vectors = ([p for p in model if (p.ndim > 1) == many] for many in (True, False))
    groups = [
        {"params": matrices, "weight_decay": 0.1, "adapts": True},
        {"params": vectors, "weight_decay": 0.0, "adapts": False},
    ]
    return MAKERS[name](groups, rounding)
