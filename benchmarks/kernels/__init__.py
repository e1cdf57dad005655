"""The kernels of matrix products that a decode step of a GPU spends its time in."""
