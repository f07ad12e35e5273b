"""The kernel back ends: the packaged text, its launches, and the machines that run them."""
