"""Prediction: a model with its preprocessing."""
