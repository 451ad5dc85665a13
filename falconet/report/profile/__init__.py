"""Where the time of an update goes: kernels, layers, memory."""
