"""Collective transports: KV by sends and receives, shared by Gloo and NCCL."""
