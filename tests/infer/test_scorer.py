"""Scorers: what Python callers get after changing a model, and what hooks see."""

import torch

from falconet.infer.model import Model
from served import SIDE, small_classifier


def pictures(count):
    noise = torch.Generator().manual_seed(3)
    return [torch.randint(0, 256, (3, SIDE, SIDE), dtype=torch.uint8, generator=noise) for _ in range(count)]


def expected(model, photos):
    with torch.no_grad():
        logits = model.module(torch.stack([model.transform(each) for each in photos]))
    return logits.double().softmax(1)


def close(model, photos):
    found = torch.tensor([each.probabilities.tolist() for each in model.predict(photos)])
    torch.testing.assert_close(found.double(), expected(model, photos), rtol=1e-4, atol=1e-6)


def test_predictions_follow_a_model_that_is_trained_further():
    model, photos = Model(small_classifier()), pictures(5)
    close(model, photos)
    before = [each.probability for each in model.predict(photos)]
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.5)
    model.module(torch.randn(4, 3, SIDE, SIDE)).square().sum().backward()
    optimizer.step()
    assert [each.probability for each in model.predict(photos)] != before
    close(model, photos)


def test_predictions_follow_weights_that_are_loaded_or_replaced():
    model, photos = Model(small_classifier()), pictures(2)
    model.predict(photos)
    model.module.load_state_dict({key: value * 1.1 for key, value in model.module.state_dict().items()})
    close(model, photos)
    model.module.fc.weight.data = model.module.fc.weight.data * 2
    close(model, photos)
    model.module.bn1.running_mean += 0.1
    close(model, photos)


def test_unchanged_weights_are_folded_once(monkeypatch):
    from falconet.infer import classifier

    calls = []
    plain = classifier.fold
    monkeypatch.setattr(classifier, "fold", lambda *args: calls.append(1) or plain(*args))
    model = Model(small_classifier())
    for _ in range(3):
        model.predict(pictures(3))
    assert len(calls) == 1


def test_embeddings_are_what_the_classifier_layer_gets():
    model, photos = Model(small_classifier()), pictures(3)
    seen = []
    with torch.no_grad():
        hook = model.module.fc.register_forward_pre_hook(lambda _, values: seen.append(values[0]))
        model.module(torch.stack([model.transform(each) for each in photos]))
        hook.remove()
    torch.testing.assert_close(torch.from_numpy(model.embeddings(photos)), seen[0], rtol=1e-4, atol=1e-6)
