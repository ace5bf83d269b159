"""A model as data, without torch: configuration, cost, artifact, golden cases, tokenizer, chat template."""
