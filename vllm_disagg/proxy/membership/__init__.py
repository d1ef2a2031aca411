"""Which instances there are: where they are named, how they join and leave, and whether they
answer.
"""
