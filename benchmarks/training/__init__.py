"""Training runs to compare: the transformer's ablation and recurrent baselines."""
