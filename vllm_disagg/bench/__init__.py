"""Measurements of running deployments.

`vllm-disagg bench` measures goodput, `vllm-disagg profile` the step times of one instance.
"""
