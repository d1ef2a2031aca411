"""KV in GPU memory: Triton kernels, and NCCL as a transport."""
