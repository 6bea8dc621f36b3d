"""Clock, power and heat: what kernels draw, what a cap leaves them, what a clock does to times."""
