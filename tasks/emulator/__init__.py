"""An AWS on a laptop: moto with its gaps filled, and instances that are containers.

For trying the AWS path without an account, and for testing it with errors
injected. Control plane, notices, boot, signals and networks behave as AWS
documents them; capacity and prices are modelled; EFS is a directory, and there
are no GPUs. Each thing that differs from plain moto has a contract test that
names AWS's documentation.
"""
