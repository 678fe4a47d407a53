"""A model of time that needs no ranks: a graph of tasks, and the messages of a schedule on a network.

graph.py times any tasks that wait for each other; messages.py times rounds of messages, whole rounds at once as long as
their order is known. The formulas (alpha-beta-gamma) are in collectives/cost.py, with the algorithms they price.
"""
