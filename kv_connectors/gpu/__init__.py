"""KV in GPU memory: Triton kernels and NCCL."""
