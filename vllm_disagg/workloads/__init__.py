"""Descriptions of request traffic that the planner and the bench share: traces and distributions of
lengths.
"""
