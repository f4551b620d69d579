"""What the embedding pipelines share: a model, a corpus, and the proof that nothing was lost."""
