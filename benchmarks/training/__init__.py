"""Trainings that are compared: the ablation of the transformer, and recurrent baselines."""
