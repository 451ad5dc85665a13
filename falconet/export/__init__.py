"""Trained models in the formats of other programs, each checked against its original model."""
