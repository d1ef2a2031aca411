"""`vllm-disagg up`: prefill and decode instances and the proxy, on this machine.

main -> (machine, plan, processes); `plan` is pure, `guard` is a process of its own.
"""
