"""Measurements of running deployments: goodput (`vllm-disagg bench`) and step times of one instance
(`profile`).
"""
