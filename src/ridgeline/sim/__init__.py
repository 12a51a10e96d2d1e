"""What happens on a cluster: collectives, the event loop and serving, on top of plans and costs."""
