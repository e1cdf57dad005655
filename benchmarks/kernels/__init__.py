"""The kernels that a decode step of a GPU spends its time in, alone and in an engine."""
