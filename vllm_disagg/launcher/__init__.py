"""`vllm-disagg up`: prefill and decode instances and the proxy, on this machine.

main -> (flags, config_file, machine, model_check, plan, processes, scrape_targets); machine ->
free_memory. `plan`, `phases` and `backoff` are pure, `guard` is a process of its own.
"""
