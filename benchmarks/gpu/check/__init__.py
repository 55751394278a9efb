"""The first ten minutes on a GPU, in parts that save as they go: ``tools/check_gpu.py`` runs all of them."""
