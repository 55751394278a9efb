"""Pairing: the backward of each micro-batch runs beside the forward of the next one."""
