"""How long would a micro-batch take on GPUs? The model of a launch command on a virtual GPU, played in time."""
