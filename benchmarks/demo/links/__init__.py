"""The link between the ranks of the demo: shaped by the kernel, or paced."""
