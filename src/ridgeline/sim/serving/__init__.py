"""Serving: what a deployment of a language model does under a stream of requests."""
