"""Rendezvous on etcd v3 for plain torchrun: `torchrun --rdzv-backend=etcd3 --rdzv-endpoint=HOST:PORT …`.

torchrun finds it by the entry point `etcd3` of the group `torchrun.handlers`;
nothing has to be imported. `handler.create_handler` documents the options.
"""
