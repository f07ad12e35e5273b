"""The back ends of kernels: the packaged text, its launches, and the machines that run them."""
