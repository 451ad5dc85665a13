"""Prediction: a model with its preprocessing, and the server that answers with it."""
