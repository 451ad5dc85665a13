"""Trained models in the formats of other programs, each checked against the model it came from."""
