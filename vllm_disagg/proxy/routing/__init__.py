"""Which instances serve a request, and when: the fleet's state, policies, pairs and queues."""
