"""The command `vllm-disagg doctor`: one line a check, with what to do.

    main -> this_machine -> key_file                       checks of this machine
         -> proxy_checks                                   of a proxy and the fleet behind it
         -> fleet_checks -> instance_checks, pair_checks, pair_proof
                                                           of instances and their pairs

All of them add findings to a `findings.Report`. No finding has a key or a prompt.
"""
