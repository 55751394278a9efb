"""Checkpoints as files, for everybody who reads them: which ones a folder has, and which are complete."""
