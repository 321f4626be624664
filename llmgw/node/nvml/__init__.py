"""GPUs, by NVIDIA's management library asked in a process of its own."""
