"""Trackers: TensorBoard, Weights & Biases, MLflow and Aim."""
