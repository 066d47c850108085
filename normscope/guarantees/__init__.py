"""What theory guarantees for a model on its data, and what measures of margins and flatness say."""
