"""KV by collective sends: what Gloo and NCCL share."""
