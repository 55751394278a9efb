"""What a trained checkpoint is good for: its perplexity on a data set, and text that it writes."""
