"""Measuring what runs: goodput of deployments (`vllm-disagg bench`) and step times of one instance (`profile`)."""
